/*
 * The benchmark's instance generator, with the same random draws. Called through ctypes from
 * mlbert/data/prepare/generator.py. The Python reference is mlbert/data/prepare/instances.py and
 * mlbert/data/formats/static_masking.py.
 *
 * The sentences of a document are contiguous, so segments A and B of an instance are ranges of the text's tokens.
 * Instances are kept as two ranges and their masks, and written out as rows after the last shuffle.
 *
 * Floating point is used only in exact comparisons of drawn numbers and in one product that is rounded to an integer.
 * Neither depends on how the compiler contracts expressions.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "growing.h"

enum { STATE_WORDS = 624, STATE_MIDDLE = 397 };

/* Python's random.Random: MT19937, generated one block of outputs at a time. */
struct generator {
    uint32_t state[STATE_WORDS], block[STATE_WORDS];
    int next; /* position in block */
};

static void temper(struct generator *g)
{
    for (int i = 0; i < STATE_WORDS; ++i) {
        uint32_t y = g->state[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        g->block[i] = y ^ (y >> 18);
    }
}

static inline uint32_t twist(uint32_t high, uint32_t low)
{
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}

static void refill(struct generator *g)
{
    uint32_t *s = g->state;
    for (int i = 0; i < STATE_WORDS - STATE_MIDDLE; ++i)
        s[i] = s[i + STATE_MIDDLE] ^ twist(s[i], s[i + 1]);
    for (int i = STATE_WORDS - STATE_MIDDLE; i < STATE_WORDS - 1; ++i)
        s[i] = s[i + STATE_MIDDLE - STATE_WORDS] ^ twist(s[i], s[i + 1]);
    s[STATE_WORDS - 1] = s[STATE_MIDDLE - 1] ^ twist(s[STATE_WORDS - 1], s[0]);
    temper(g);
    g->next = 0;
}

static inline uint32_t draw32(struct generator *g)
{
    if (g->next == STATE_WORDS)
        refill(g);
    return g->block[g->next++];
}

/* random.random(): a double with 53 random bits. */
static inline double draw(struct generator *g)
{
    const uint32_t a = draw32(g) >> 5, b = draw32(g) >> 6;
    return (a * 67108864.0 + b) * (1.0 / 9007199254740992.0);
}

/* A number below n (1 <= n < 2^32), from getrandbits with rejection. */
static inline uint32_t below(struct generator *g, uint32_t n)
{
    const int shift = __builtin_clz(n);
    uint32_t r;
    do
        r = draw32(g) >> shift;
    while (r >= n);
    return r;
}

/* randint(low, high), inclusive. */
static inline uint32_t between(struct generator *g, uint32_t low, uint32_t high)
{
    return low + below(g, high - low + 1);
}

/* random.shuffle. A rejected draw swaps an element with itself instead of branching: about a quarter of
 * the draws are rejected, unpredictably, and a mispredicted branch costs more than the swap. */
#define DEFINE_SHUFFLE(NAME, TYPE)                                                                                     \
    static void NAME(struct generator *g, TYPE *items, uint32_t count)                                                 \
    {                                                                                                                  \
        uint32_t i = count ? count - 1 : 0;                                                                            \
        while (i >= 1) {                                                                                               \
            const int shift = __builtin_clz(i + 1);                                                                    \
            const uint32_t lowest = (0x80000000u >> shift) - 1; /* while i + 1 has this many bits */                \
            while (i >= lowest) {                                                                                      \
                const uint32_t r = draw32(g) >> shift;                                                                 \
                const uint32_t accepted = r <= i;                                                                      \
                const uint32_t j = i ^ ((i ^ r) & -accepted);                                                          \
                const TYPE kept = items[i];                                                                            \
                items[i] = items[j];                                                                                   \
                items[j] = kept;                                                                                       \
                i -= accepted;                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_SHUFFLE(shuffle_positions, uint16_t)
DEFINE_SHUFFLE(shuffle_indices, uint32_t)

struct options {
    double masked_lm_prob, short_seq_prob;
    int32_t max_seq_length, max_predictions, dupe_factor;
    int32_t mask_id, cls_id, sep_id, vocab_size;
};

/* Documents: sentence s holds tokens[sentences[s]:sentences[s + 1]], and document d holds the sentences documents[d] to
 * documents[d + 1] - 1. No document is empty. */
struct text {
    const uint16_t *tokens;
    const int64_t *sentences, *documents;
    int64_t num_documents;
};

struct instance {
    int64_t first, second, masks; /* where A, B and the masks begin */
    uint16_t first_length, second_length, num_masks;
    uint8_t random_next;
};

struct mask {
    uint16_t position, token;
};

struct result {
    struct text text;
    struct options options;
    struct generator random;
    struct instance *instances;
    struct mask *masks;
    uint32_t *order;                       /* [num_documents], later [num_instances] */
    uint16_t *candidates, *replacements;   /* [max_seq_length] */
    uint64_t *chosen;                      /* bit set over positions */
    int64_t num_instances, room_instances; /* at most 2^32 - 1 */
    int64_t num_masks, room_masks, num_tokens;
};

/* A range of tokens. */
struct range {
    int64_t begin, end;
};

static inline int64_t length_of(struct range r)
{
    return r.end - r.begin;
}

/* Truncate A and B to max_tokens in total: drop one token at a time from the longer (B on a tie), front or back. */
static void truncate_pair(struct generator *g, struct range *a, struct range *b, int64_t max_tokens)
{
    for (int64_t excess = length_of(*a) + length_of(*b) - max_tokens; excess > 0; --excess) {
        struct range *longer = length_of(*a) > length_of(*b) ? a : b;
        if (draw(g) < 0.5)
            ++longer->begin;
        else
            --longer->end;
    }
}

static uint16_t token_at(const struct result *r, const struct instance *x, int position)
{
    const int in_second = position - x->first_length - 2;
    return r->text.tokens[in_second < 0 ? x->first + position - 1 : x->second + in_second];
}

/* Draw the masks of an instance and append them in order of position. */
static int mask_instance(struct result *r, struct instance *x)
{
    struct generator *g = &r->random;
    const struct options *o = &r->options;
    const int words = x->first_length + x->second_length;
    int count = 0;
    for (int position = 1; position <= words + 1; ++position)
        if (position != x->first_length + 1)
            r->candidates[count++] = (uint16_t)position;
    shuffle_positions(g, r->candidates, (uint32_t)count);

    double rounded = rint((words + 3) * o->masked_lm_prob); /* half to even, like Python's round */
    int wanted = rounded > 1 ? (int)rounded : 1;
    wanted = wanted < o->max_predictions ? wanted : o->max_predictions;
    wanted = wanted < count ? wanted : count;
    for (int i = 0; i < wanted; ++i) {
        const uint16_t position = r->candidates[i];
        uint16_t token = (uint16_t)o->mask_id;
        if (draw(g) >= 0.8)
            token = draw(g) < 0.5 ? token_at(r, x, position) : (uint16_t)below(g, (uint32_t)o->vocab_size);
        r->replacements[position] = token;
        r->chosen[position >> 6] |= (uint64_t)1 << (position & 63);
    }

    if (make_room(&r->masks, &r->room_masks, r->num_masks + wanted, sizeof *r->masks))
        return -1;
    x->masks = r->num_masks;
    x->num_masks = (uint16_t)wanted;
    for (int word = 0; word <= (words + 1) >> 6; ++word) {
        for (uint64_t bits = r->chosen[word]; bits; bits &= bits - 1) {
            const uint16_t position = (uint16_t)(word * 64 + __builtin_ctzll(bits));
            r->masks[r->num_masks++] = (struct mask){position, r->replacements[position]};
        }
        r->chosen[word] = 0;
    }
    return 0;
}

static int append_instance(struct result *r, struct range a, struct range b, int random_next)
{
    truncate_pair(&r->random, &a, &b, r->options.max_seq_length - 3);
    if (r->num_instances == UINT32_MAX)
        return -1;
    if (make_room(&r->instances, &r->room_instances, r->num_instances + 1, sizeof *r->instances))
        return -1;
    struct instance *x = &r->instances[r->num_instances++];
    *x = (struct instance){.first = a.begin,
                           .second = b.begin,
                           .first_length = (uint16_t)length_of(a),
                           .second_length = (uint16_t)length_of(b),
                           .random_next = (uint8_t)random_next};
    r->num_tokens += length_of(a) + length_of(b) + 3;
    return mask_instance(r, x);
}

/* Take sentences from a random position in another document: `target` tokens, or fewer if it ends first. */
static struct range random_second(struct result *r, uint32_t index, int64_t target)
{
    struct generator *g = &r->random;
    const int64_t *sentences = r->text.sentences;
    uint32_t other = 0;
    for (int attempt = 0; attempt < 10; ++attempt) {
        other = between(g, 0, (uint32_t)r->text.num_documents - 1);
        if (other != index)
            break;
    }
    const int64_t *document = &r->text.documents[r->order[other]];
    const int64_t start = document[0] + between(g, 0, (uint32_t)(document[1] - document[0]) - 1);
    int64_t end = start + 1;
    while (end < document[1] && sentences[end] - sentences[start] < target)
        ++end;
    return (struct range){sentences[start], sentences[end]};
}

/* Generate the instances of one document: collect sentences up to a target length, then split them into A and B. */
static int document_instances(struct result *r, uint32_t index)
{
    struct generator *g = &r->random;
    const int64_t *sentences = r->text.sentences, *document = &r->text.documents[r->order[index]];
    const int max_tokens = r->options.max_seq_length - 3;
    int64_t target = max_tokens;
    if (draw(g) < r->options.short_seq_prob)
        target = between(g, 2, (uint32_t)max_tokens);
    int64_t begin = document[0];
    while (begin < document[1]) {
        int64_t end = begin + 1;
        while (end < document[1] && sentences[end] - sentences[begin] < target)
            ++end;
        const uint32_t count = (uint32_t)(end - begin);
        const int64_t middle = begin + (count >= 2 ? between(g, 1, count - 1) : 1);
        const struct range a = {sentences[begin], sentences[middle]};
        struct range b = {sentences[middle], sentences[end]};
        const int random_next = count == 1 || draw(g) < 0.5;
        if (random_next) {
            b = random_second(r, index, target - length_of(a));
            end = middle; /* reuse the sentences after A */
        }
        if (append_instance(r, a, b, random_next))
            return -1;
        begin = end;
    }
    return 0;
}

static int shuffled_order(struct result *r, int64_t count)
{
    free(r->order);
    r->order = malloc(((size_t)count + 1) * sizeof *r->order);
    if (!r->order)
        return -1;
    for (int64_t i = 0; i < count; ++i)
        r->order[i] = (uint32_t)i;
    shuffle_indices(&r->random, r->order, (uint32_t)count);
    return 0;
}

static int run(struct result *r)
{
    const size_t positions = (size_t)r->options.max_seq_length;
    r->candidates = malloc(positions * sizeof *r->candidates);
    r->replacements = malloc(positions * sizeof *r->replacements);
    r->chosen = calloc(positions / 64 + 1, sizeof *r->chosen);
    if (!r->candidates || !r->replacements || !r->chosen || shuffled_order(r, r->text.num_documents))
        return -1;
    for (int pass = 0; pass < r->options.dupe_factor; ++pass)
        for (int64_t index = 0; index < r->text.num_documents; ++index)
            if (document_instances(r, (uint32_t)index))
                return -1;
    return shuffled_order(r, r->num_instances);
}

void instances_free(struct result *r)
{
    if (!r)
        return;
    free(r->instances);
    free(r->masks);
    free(r->order);
    free(r->candidates);
    free(r->replacements);
    free(r->chosen);
    free(r);
}

/*
 * Generate all instances of a text.
 *
 * state: random.Random.getstate()[1], 624 words and the index of the next one. counts: instances, tokens, masks.
 * The text must stay valid until instances_take. Returns NULL if out of memory.
 */
struct result *instances_make(const uint16_t *tokens, const int64_t *sentences, const int64_t *documents,
                              int64_t num_documents, const struct options *options, const uint32_t *state,
                              int64_t *counts)
{
    struct result *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->text = (struct text){tokens, sentences, documents, num_documents};
    r->options = *options;
    memcpy(r->random.state, state, sizeof r->random.state);
    temper(&r->random);
    r->random.next = (int)state[STATE_WORDS];
    if (run(r)) {
        instances_free(r);
        return NULL;
    }
    counts[0] = r->num_instances;
    counts[1] = r->num_tokens;
    counts[2] = r->num_masks;
    return r;
}

/* Write the instances as rows, in shuffled order, into the arrays of mlbert/data/formats/ragged.py. */
void instances_take(const struct result *r, uint16_t *tokens, int64_t *offsets, uint16_t *positions, uint16_t *labels,
                    int64_t *masked_offsets, uint16_t *first_lengths, uint8_t *next_sentence)
{
    const uint16_t *text = r->text.tokens;
    int64_t token = 0, mask = 0;
    for (int64_t i = 0; i < r->num_instances; ++i) {
        const struct instance *x = &r->instances[r->order[i]];
        uint16_t *row = tokens + token;
        row[0] = (uint16_t)r->options.cls_id;
        memcpy(row + 1, text + x->first, x->first_length * sizeof *row);
        row[x->first_length + 1] = (uint16_t)r->options.sep_id;
        memcpy(row + x->first_length + 2, text + x->second, x->second_length * sizeof *row);
        row[x->first_length + x->second_length + 2] = (uint16_t)r->options.sep_id;
        offsets[i] = token;
        masked_offsets[i] = mask;
        for (const struct mask *m = r->masks + x->masks, *end = m + x->num_masks; m < end; ++m, ++mask) {
            positions[mask] = m->position;
            labels[mask] = row[m->position];
            row[m->position] = m->token;
        }
        token += x->first_length + x->second_length + 3;
        first_lengths[i] = (uint16_t)(x->first_length + 2);
        next_sentence[i] = x->random_next;
    }
    offsets[r->num_instances] = token;
    masked_offsets[r->num_instances] = mask;
}
