/*
 * Convert text to token ids, exactly like mlbert/data/formats/wordpiece.py, which calls this through ctypes.
 *
 * A chunk is the bytes between spaces, tabs and line ends (the text has no carriage returns). Its tokens depend on the
 * chunk alone, so each distinct chunk is tokenized once and cached: ASCII chunks here, the others in Python. A block of
 * lines takes three calls: wordpiece_scan finds its chunks, wordpiece_define stores the tokens that Python computed for
 * the unknown ones, and wordpiece_append adds the block's sentences to the documents.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "growing.h"

enum { MAX_WORD = 200 }; /* MAX_CHARS_PER_WORD of mlbert/data/formats/wordpiece.py */
#define LINE_END UINT32_MAX
#define NO_NODE 0u

/* ASCII vocabulary entries as a trie whose edges are in a hash table keyed by (node, byte). Node 0 is unused. */
struct trie {
    uint64_t *edges;   /* node << 8 | byte, or 0 if free */
    uint32_t *targets; /* of the edge table */
    int64_t num_slots; /* a power of two */
    int32_t *ids;      /* [num_nodes] entry that ends at this node, or -1 */
    uint32_t num_nodes, start, inside;
};

struct chunk {
    int64_t begin, length; /* in the text */
    int64_t first;         /* of its tokens in the pool */
    uint32_t hash, num_tokens;
    uint8_t blank; /* stripping leaves nothing */
};

struct tokenizer {
    struct trie trie;
    int lower_case;
    uint16_t unknown;

    const uint8_t *text;
    struct chunk *chunks;
    uint64_t *slots; /* hash << 32 | chunk + 1, or 0 if free */
    uint16_t *pool;
    uint32_t *seen, *pending; /* chunks of the block in order with LINE_END between lines; those left to Python */
    int64_t num_chunks, room_chunks, num_slots, num_pool, room_pool;
    int64_t num_seen, room_seen, num_pending, room_pending;

    uint16_t *tokens;
    int64_t *sentences, *documents; /* ends of the sentences (in tokens) and documents (in sentences) so far */
    int64_t num_tokens, room_tokens, num_sentences, room_sentences, num_documents, room_documents;
};

static inline uint64_t mix(uint64_t key)
{
    key *= 0x9e3779b97f4a7c15u;
    return key ^ (key >> 29);
}

/* Return the slot of an edge, or the free slot for it. */
static inline int64_t edge_slot(const struct trie *t, uint64_t key)
{
    int64_t slot = (int64_t)(mix(key) & (uint64_t)(t->num_slots - 1));
    while (t->edges[slot] && t->edges[slot] != key)
        slot = (slot + 1) & (t->num_slots - 1);
    return slot;
}

static inline uint32_t child(const struct trie *t, uint32_t node, uint8_t byte)
{
    const uint64_t key = (uint64_t)node << 8 | byte;
    const int64_t slot = edge_slot(t, key);
    return t->edges[slot] ? t->targets[slot] : NO_NODE;
}

static uint32_t add_path(struct trie *t, uint32_t node, const uint8_t *bytes, int64_t length)
{
    for (int64_t i = 0; i < length; ++i) {
        const uint64_t key = (uint64_t)node << 8 | bytes[i];
        const int64_t slot = edge_slot(t, key);
        if (!t->edges[slot]) {
            t->edges[slot] = key;
            t->targets[slot] = t->num_nodes;
            t->ids[t->num_nodes++] = -1;
        }
        node = t->targets[slot];
    }
    return node;
}

static int build_trie(struct trie *t, const uint8_t *entries, const int64_t *offsets, const int32_t *ids, int64_t count)
{
    const int64_t most_nodes = offsets[count] + 4;
    for (t->num_slots = 1024; t->num_slots < 2 * most_nodes;)
        t->num_slots *= 2;
    t->edges = calloc((size_t)t->num_slots, sizeof *t->edges);
    t->targets = malloc((size_t)t->num_slots * sizeof *t->targets);
    t->ids = malloc((size_t)most_nodes * sizeof *t->ids);
    if (!t->edges || !t->targets || !t->ids)
        return -1;
    t->start = 1;
    t->num_nodes = 2;
    t->ids[0] = t->ids[1] = -1;
    t->inside = add_path(t, t->start, (const uint8_t *)"##", 2);
    for (int64_t i = 0; i < count; ++i)
        t->ids[add_path(t, t->start, entries + offsets[i], offsets[i + 1] - offsets[i])] = ids[i];
    return 0;
}

void wordpiece_free(struct tokenizer *t)
{
    if (!t)
        return;
    void *arrays[] = {t->trie.edges, t->trie.targets, t->trie.ids, t->chunks, t->slots,     t->pool,
                      t->seen,       t->pending,      t->tokens,   t->sentences, t->documents};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i)
        free(arrays[i]);
    free(t);
}

/* Vocabulary entry i, in ASCII, is entries[offsets[i]:offsets[i + 1]] with id ids[i]. Returns NULL if out of memory. */
struct tokenizer *wordpiece_new(const uint8_t *entries, const int64_t *offsets, const int32_t *ids, int64_t count,
                                int unknown, int lower_case)
{
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->unknown = (uint16_t)unknown;
    t->lower_case = lower_case;
    t->num_slots = 1 << 16;
    t->slots = calloc((size_t)t->num_slots, sizeof *t->slots);
    if (!t->slots || build_trie(&t->trie, entries, offsets, ids, count)) {
        wordpiece_free(t);
        return NULL;
    }
    return t;
}

/* Drop all cached chunks. Call it only between two blocks. */
void wordpiece_forget(struct tokenizer *t)
{
    memset(t->slots, 0, (size_t)t->num_slots * sizeof *t->slots);
    t->num_chunks = t->num_pool = 0;
}

/* Start a new text. */
void wordpiece_reset(struct tokenizer *t)
{
    wordpiece_forget(t);
    t->num_seen = t->num_pending = t->num_tokens = t->num_sentences = t->num_documents = 0;
}

/* Return the bytes used by the cached chunks, without the text. */
int64_t wordpiece_remembered_bytes(const struct tokenizer *t)
{
    const size_t bytes = (size_t)t->num_chunks * sizeof *t->chunks + (size_t)t->num_slots * sizeof *t->slots;
    return (int64_t)(bytes + (size_t)t->num_pool * sizeof *t->pool);
}

static int push(struct tokenizer *t, int32_t id)
{
    if (make_room(&t->pool, &t->room_pool, t->num_pool + 1, sizeof *t->pool))
        return -1;
    t->pool[t->num_pool++] = (uint16_t)id;
    return 0;
}

/* Split one word into pieces, greedy longest match first; [UNK] alone if a remainder matches nothing. */
static int push_word(struct tokenizer *t, const uint8_t *word, int64_t length)
{
    const int64_t before = t->num_pool;
    int64_t start = 0;
    while (start < length && length <= MAX_WORD) {
        uint32_t node = start ? t->trie.inside : t->trie.start;
        int32_t found = -1;
        int64_t found_end = start;
        for (int64_t end = start; end < length;) {
            node = child(&t->trie, node, word[end++]);
            if (node == NO_NODE)
                break;
            if (t->trie.ids[node] >= 0) {
                found = t->trie.ids[node];
                found_end = end;
            }
        }
        if (found < 0)
            break;
        if (push(t, found))
            return -1;
        start = found_end;
    }
    if (start == length)
        return 0;
    t->num_pool = before;
    return push(t, t->unknown);
}

static inline int is_punctuation(uint8_t c)
{
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) || (c >= 123 && c <= 126);
}

/* Python's str.strip treats these control characters as white space; cleaning drops them like the others. */
static inline int is_blank_control(uint8_t c)
{
    return c == 0x0b || c == 0x0c || (c >= 0x1c && c <= 0x1f);
}

/* Tokenize an ASCII chunk: drop control characters, lower the case, split off punctuation. */
static int work_out(struct tokenizer *t, struct chunk *chunk)
{
    uint8_t word[MAX_WORD + 1];
    int64_t length = 0; /* of the word, even if it is too long to be kept */
    chunk->first = t->num_pool;
    chunk->blank = 1;
    for (int64_t i = 0; i < chunk->length; ++i) {
        uint8_t c = t->text[chunk->begin + i];
        chunk->blank &= (uint8_t)is_blank_control(c);
        if (c < 32 || c == 127)
            continue;
        if (t->lower_case && c >= 'A' && c <= 'Z')
            c += 32;
        if (is_punctuation(c)) {
            if ((length && push_word(t, word, length)) || push_word(t, &c, 1))
                return -1;
            length = 0;
        } else {
            word[length < MAX_WORD ? length : MAX_WORD] = c;
            ++length;
        }
    }
    if (length && push_word(t, word, length))
        return -1;
    chunk->num_tokens = (uint32_t)(t->num_pool - chunk->first);
    return 0;
}

static int grow_slots(struct tokenizer *t)
{
    const int64_t num_slots = t->num_slots * 4;
    uint64_t *slots = calloc((size_t)num_slots, sizeof *slots);
    if (!slots)
        return -1;
    for (int64_t i = 0; i < t->num_chunks; ++i) {
        int64_t slot = t->chunks[i].hash & (num_slots - 1);
        while (slots[slot])
            slot = (slot + 1) & (num_slots - 1);
        slots[slot] = (uint64_t)t->chunks[i].hash << 32 | (uint64_t)(i + 1);
    }
    free(t->slots);
    t->slots = slots;
    t->num_slots = num_slots;
    return 0;
}

static int new_chunk(struct tokenizer *t, int64_t begin, int64_t length, uint32_t hash, int is_ascii, int64_t slot)
{
    if (t->num_chunks >= UINT32_MAX - 1 || make_room(&t->chunks, &t->room_chunks, t->num_chunks + 1, sizeof *t->chunks))
        return -1;
    struct chunk *chunk = &t->chunks[t->num_chunks++];
    *chunk = (struct chunk){.begin = begin, .length = length, .hash = hash};
    t->slots[slot] = (uint64_t)hash << 32 | (uint64_t)t->num_chunks;
    if (is_ascii) {
        if (work_out(t, chunk))
            return -1;
    } else {
        if (make_room(&t->pending, &t->room_pending, t->num_pending + 1, sizeof *t->pending))
            return -1;
        t->pending[t->num_pending++] = (uint32_t)(t->num_chunks - 1);
    }
    return t->num_chunks * 2 > t->num_slots ? grow_slots(t) : 0;
}

/* Record the next chunk of the block, known or new. */
static inline int see(struct tokenizer *t, int64_t begin, int64_t length, uint32_t hash, int is_ascii)
{
    int64_t slot = hash & (t->num_slots - 1);
    for (uint64_t entry; (entry = t->slots[slot]); slot = (slot + 1) & (t->num_slots - 1)) {
        const uint32_t index = (uint32_t)entry - 1;
        const struct chunk *known = &t->chunks[index];
        if (entry >> 32 == hash && known->length == length &&
            !memcmp(t->text + known->begin, t->text + begin, (size_t)length)) {
            t->seen[t->num_seen++] = index;
            return 0;
        }
    }
    t->seen[t->num_seen++] = (uint32_t)t->num_chunks;
    return new_chunk(t, begin, length, hash, is_ascii, slot);
}

/*
 * Find the chunks of text[begin:end], which must be complete lines. The text must stay valid until wordpiece_forget.
 * Returns the number of chunks that Python must tokenize, or -1 if out of memory.
 */
int64_t wordpiece_scan(struct tokenizer *t, const uint8_t *text, int64_t begin, int64_t end)
{
    t->text = text;
    t->num_seen = t->num_pending = 0;
    if (make_room(&t->seen, &t->room_seen, end - begin + 1, sizeof *t->seen))
        return -1;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t start = i;
        uint64_t hash = 0xcbf29ce484222325u;
        uint8_t any = 0, c = 0;
        for (; i < end && (c = text[i]) != ' ' && c != '\n' && c != '\t'; ++i) {
            any |= c;
            hash = (hash ^ c) * 0x100000001b3u;
        }
        if (i > start && see(t, start, i - start, (uint32_t)(hash ^ hash >> 32), any < 128))
            return -1;
        if (i < end && c == '\n')
            t->seen[t->num_seen++] = LINE_END;
    }
    if (end > begin && text[end - 1] != '\n')
        t->seen[t->num_seen++] = LINE_END;
    return t->num_pending;
}

/* Return the positions of the chunks that Python must tokenize. */
void wordpiece_pending(const struct tokenizer *t, int64_t *begins, int64_t *lengths)
{
    for (int64_t i = 0; i < t->num_pending; ++i) {
        begins[i] = t->chunks[t->pending[i]].begin;
        lengths[i] = t->chunks[t->pending[i]].length;
    }
}

/* Store the result from Python: chunk i has tokens[offsets[i]:offsets[i + 1]], and is blank or not. */
int wordpiece_define(struct tokenizer *t, const uint16_t *tokens, const int64_t *offsets, const uint8_t *blank)
{
    const int64_t count = offsets[t->num_pending];
    if (make_room(&t->pool, &t->room_pool, t->num_pool + count, sizeof *t->pool))
        return -1;
    for (int64_t i = 0; i < t->num_pending; ++i) {
        struct chunk *chunk = &t->chunks[t->pending[i]];
        chunk->first = t->num_pool + offsets[i];
        chunk->num_tokens = (uint32_t)(offsets[i + 1] - offsets[i]);
        chunk->blank = blank[i];
    }
    memcpy(t->pool + t->num_pool, tokens, (size_t)count * sizeof *tokens);
    t->num_pool += count;
    return 0;
}

static int end_document(struct tokenizer *t)
{
    const int64_t before = t->num_documents ? t->documents[t->num_documents - 1] : 0;
    if (t->num_sentences == before)
        return 0;
    if (make_room(&t->documents, &t->room_documents, t->num_documents + 1, sizeof *t->documents))
        return -1;
    t->documents[t->num_documents++] = t->num_sentences;
    return 0;
}

static int end_line(struct tokenizer *t, int blank)
{
    const int64_t before = t->num_sentences ? t->sentences[t->num_sentences - 1] : 0;
    if (blank)
        return end_document(t);
    if (t->num_tokens == before)
        return 0;
    if (make_room(&t->sentences, &t->room_sentences, t->num_sentences + 1, sizeof *t->sentences))
        return -1;
    t->sentences[t->num_sentences++] = t->num_tokens;
    return 0;
}

/* Add the block's lines to the documents; `last` ends the last document. counts: tokens, sentences, documents. */
int wordpiece_append(struct tokenizer *t, int last, int64_t *counts)
{
    int blank = 1;
    for (int64_t i = 0; i < t->num_seen; ++i) {
        if (t->seen[i] == LINE_END) {
            if (end_line(t, blank))
                return -1;
            blank = 1;
            continue;
        }
        const struct chunk *chunk = &t->chunks[t->seen[i]];
        if (make_room(&t->tokens, &t->room_tokens, t->num_tokens + chunk->num_tokens, sizeof *t->tokens))
            return -1;
        for (uint32_t k = 0; k < chunk->num_tokens; ++k)
            t->tokens[t->num_tokens + k] = t->pool[chunk->first + k];
        t->num_tokens += chunk->num_tokens;
        blank &= chunk->blank;
    }
    if (last && end_document(t))
        return -1;
    counts[0] = t->num_tokens;
    counts[1] = t->num_sentences;
    counts[2] = t->num_documents;
    return 0;
}

/* Copy out the documents: tokens, and the starts of sentences [S + 1] and documents [D + 1]. */
void wordpiece_take(struct tokenizer *t, uint16_t *tokens, int64_t *sentences, int64_t *documents)
{
    sentences[0] = documents[0] = 0;
    if (t->num_documents == 0)
        return;
    memcpy(tokens, t->tokens, (size_t)t->num_tokens * sizeof *tokens);
    memcpy(sentences + 1, t->sentences, (size_t)t->num_sentences * sizeof *sentences);
    memcpy(documents + 1, t->documents, (size_t)t->num_documents * sizeof *documents);
}
