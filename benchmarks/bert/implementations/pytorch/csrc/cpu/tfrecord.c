/*
 * TFRecord framing, CRC32C, and the benchmark's tf.train.Example read into and written from ragged arrays. Called
 * through ctypes from mlbert/data/tfrecord_native.py; mlbert/data/tfrecord_plain.py is the same in Python, and makes the
 * message for whatever is refused here. Little-endian machines.
 *
 * A record is: uint64 length, uint32 masked CRC32C of the length, the data, uint32 masked CRC32C of the data.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

enum { HEADER_BYTES = 12, FOOTER_BYTES = 4 };
enum { SCAN_INCOMPLETE, SCAN_BAD_LENGTH, SCAN_FULL };
enum { INPUT_IDS, MASKED_LM_POSITIONS, INPUT_MASK, SEGMENT_IDS, MASKED_LM_WEIGHTS, MASKED_LM_IDS, NEXT_SENTENCE, NUM_LISTS };
enum { KIND_NONE = 0, KIND_FLOAT = 2, KIND_INT = 3 }; /* field numbers of tf.train.Feature */
enum { WIRE_VARINT, WIRE_64, WIRE_BYTES, WIRE_32 = 5 };
#define TOO_LARGE 65536 /* stands for every integer that no feature may hold */
#define BAD_WEIGHT 2    /* stands for every weight other than 0 and 1 */

/* In the order in which the benchmark's files hold them. No two names have the same length. */
static const char *const NAMES[NUM_LISTS] = {"input_ids",         "masked_lm_positions", "input_mask",
                                             "segment_ids",       "masked_lm_weights",   "masked_lm_ids",
                                             "next_sentence_labels"};

/* ---- CRC32C ---- */

static uint32_t crc_table[8][256];

__attribute__((constructor)) static void fill_crc_table(void)
{
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        crc_table[0][byte] = crc;
    }
    for (int row = 1; row < 8; ++row)
        for (int byte = 0; byte < 256; ++byte) {
            const uint32_t before = crc_table[row - 1][byte];
            crc_table[row][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
}

/* CRC32C of bytes[size] by tables, eight bytes at a time. */
uint32_t tfrecord_crc32c_table(const uint8_t *bytes, int64_t size)
{
    uint32_t crc = ~0u;
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; ++i)
            crc ^= crc_table[7 - i][word >> 8 * i & 255];
    }
    for (; size > 0; --size)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *bytes++) & 255];
    return ~crc;
}

/* CRC32C of bytes[size], by the processor's instruction where the library is compiled for one that has it. */
uint32_t tfrecord_crc32c(const uint8_t *bytes, int64_t size)
{
#ifdef __SSE4_2__
    uint64_t crc = ~0u;
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; size > 0; --size)
        crc = _mm_crc32_u8((uint32_t)crc, *bytes++);
    return ~(uint32_t)crc;
#else
    return tfrecord_crc32c_table(bytes, size);
#endif
}

static uint32_t masked_crc(const uint8_t *bytes, int64_t size)
{
    const uint32_t crc = tfrecord_crc32c(bytes, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static int has_crc(const uint8_t *bytes, int64_t size)
{
    uint32_t stored;
    memcpy(&stored, bytes + size, 4);
    return stored == masked_crc(bytes, size);
}

/*
 * Walk over the whole records at the start of bytes[size], at most `most`. starts[n + 1]: first byte of each record,
 * and of what follows the last; intact[n]: whether the data's checksum is right. Returns n; *stopped says why it ended.
 */
int64_t tfrecord_scan(const uint8_t *bytes, int64_t size, int64_t most, int64_t *starts, uint8_t *intact, int64_t *stopped)
{
    int64_t n = 0, at = 0;
    for (starts[0] = 0;; starts[++n] = at) {
        uint64_t length;
        *stopped = SCAN_FULL;
        if (n == most)
            return n;
        *stopped = SCAN_INCOMPLETE;
        if (size - at < HEADER_BYTES)
            return n;
        if (!has_crc(bytes + at, 8)) {
            *stopped = SCAN_BAD_LENGTH;
            return n;
        }
        memcpy(&length, bytes + at, 8);
        if (size - at < HEADER_BYTES + FOOTER_BYTES || length > (uint64_t)(size - at - HEADER_BYTES - FOOTER_BYTES))
            return n;
        intact[n] = (uint8_t)has_crc(bytes + at + HEADER_BYTES, (int64_t)length);
        at += HEADER_BYTES + (int64_t)length + FOOTER_BYTES;
    }
}

/* intact[n]: whether a whole record with right checksums lies at bytes[starts[n]] to before bytes[ends[n]]. */
void tfrecord_check(const uint8_t *bytes, const int64_t *starts, const int64_t *ends, int64_t n, uint8_t *intact)
{
    for (int64_t r = 0; r < n; ++r) {
        const int64_t expected = ends[r] - starts[r] - HEADER_BYTES - FOOTER_BYTES;
        int64_t length;
        memcpy(&length, bytes + starts[r], 8);
        intact[r] = (uint8_t)(expected >= 0 && length == expected && has_crc(bytes + starts[r], 8) &&
                              has_crc(bytes + starts[r] + HEADER_BYTES, length));
    }
}

/* ---- reading protocol buffers ---- */

struct span {
    const uint8_t *at, *end;
};

struct field {
    uint64_t number, value; /* value: of WIRE_VARINT and WIRE_32 */
    struct span bytes;      /* of WIRE_BYTES */
    int wire;
};

static inline int read_varint(struct span *in, uint64_t *value)
{
    uint64_t result = 0;
    for (int shift = 0; shift < 70 && in->at < in->end; shift += 7) {
        const uint64_t byte = *in->at++;
        result |= (byte & 127) << shift;
        if (byte < 128) {
            *value = result;
            return 1;
        }
    }
    return 0;
}

/* The next field of a message; 0 when the bytes are no message. */
static int read_field(struct span *in, struct field *field)
{
    uint64_t tag, size = 0;
    if (!read_varint(in, &tag) || tag >> 32 || tag >> 3 == 0)
        return 0;
    field->number = tag >> 3;
    field->wire = (int)(tag & 7);
    field->value = 0;
    switch (field->wire) {
    case WIRE_VARINT:
        return read_varint(in, &field->value);
    case WIRE_BYTES:
        if (!read_varint(in, &size))
            return 0;
        break;
    case WIRE_64:
        size = 8;
        break;
    case WIRE_32:
        size = 4;
        break;
    default:
        return 0;
    }
    if (size > (uint64_t)(in->end - in->at))
        return 0;
    if (field->wire == WIRE_32)
        memcpy(&field->value, in->at, 4);
    field->bytes = (struct span){in->at, in->at + size};
    in->at += size;
    return 1;
}

struct list {
    int32_t *values; /* [capacity] */
    int64_t capacity, count;
    int kind;
};

static inline void append(struct list *list, int32_t value)
{
    if (list->count < list->capacity)
        list->values[list->count] = value;
    ++list->count; /* one too many is noticed by the count */
}

static inline void append_integer(struct list *list, uint64_t value)
{
    append(list, value < TOO_LARGE ? (int32_t)value : TOO_LARGE);
}

static inline void append_weight(struct list *list, uint32_t bits)
{
    append(list, bits == 0x3f800000u ? 1 : (bits & 0x7fffffffu) == 0 ? 0 : BAD_WEIGHT);
}

static int append_packed_integers(struct list *list, struct span in)
{
    /* Eight bytes at a time: eight values of one byte, as in masks, or one of up to three bytes, as every id is. */
    int32_t *values = list->values;
    int64_t n = list->count;
    for (uint64_t word; in.end - in.at >= 8 && n + 8 <= list->capacity;) {
        memcpy(&word, in.at, 8);
        if (!(word & 0x8080808080808080u)) {
            for (int i = 0; i < 8; ++i)
                values[n + i] = in.at[i];
            n += 8;
            in.at += 8;
        } else if (!(word & 0x80)) {
            values[n++] = (int32_t)(word & 0x7f);
            in.at += 1;
        } else if (!(word & 0x8000)) {
            values[n++] = (int32_t)((word & 0x7f) | (word >> 1 & 0x3f80));
            in.at += 2;
        } else if (!(word & 0x800000)) {
            const uint32_t value = (uint32_t)((word & 0x7f) | (word >> 1 & 0x3f80) | (word >> 2 & 0x1fc000));
            values[n++] = value < TOO_LARGE ? (int32_t)value : TOO_LARGE;
            in.at += 3;
        } else
            break;
    }
    list->count = n;
    for (uint64_t value; in.at < in.end; append_integer(list, value))
        if (!read_varint(&in, &value))
            return 0;
    return 1;
}

static int append_packed_weights(struct list *list, struct span in)
{
    if ((in.end - in.at) % 4)
        return 0;
    for (; in.at < in.end; in.at += 4) {
        uint32_t bits;
        memcpy(&bits, in.at, 4);
        append_weight(list, bits);
    }
    return 1;
}

/* tf.train.Int64List or FloatList: its values follow those already there. */
static int read_values(struct span in, struct list *list)
{
    struct field field;
    while (in.at < in.end) {
        if (!read_field(&in, &field))
            return 0;
        if (field.number != 1)
            continue;
        if (field.wire == WIRE_BYTES) {
            if (!(list->kind == KIND_INT ? append_packed_integers : append_packed_weights)(list, field.bytes))
                return 0;
        } else if (list->kind == KIND_INT && field.wire == WIRE_VARINT)
            append_integer(list, field.value);
        else if (list->kind == KIND_FLOAT && field.wire == WIRE_32)
            append_weight(list, (uint32_t)field.value);
    }
    return 1;
}

/* tf.train.Feature: one of three lists, the last one counts. */
static int read_feature(struct span in, struct list *list)
{
    struct field field;
    while (in.at < in.end) {
        if (!read_field(&in, &field))
            return 0;
        if (field.wire != WIRE_BYTES || field.number > 3)
            continue;
        if (list->kind != (int)field.number)
            list->count = 0;
        list->kind = (int)field.number;
        if (list->kind != 1 && !read_values(field.bytes, list))
            return 0;
    }
    return 1;
}

static struct list *find_list(struct list *lists, struct span name)
{
    const size_t size = (size_t)(name.end - name.at);
    for (int i = 0; i < NUM_LISTS; ++i)
        if (strlen(NAMES[i]) == size && !memcmp(NAMES[i], name.at, size))
            return lists + i;
    return NULL;
}

/* An entry of the map from names to features; a later entry of the same name replaces an earlier one. */
static int read_entry(struct span in, struct list *lists)
{
    struct span again = in, name = {in.at, in.at};
    struct field field;
    while (in.at < in.end) {
        if (!read_field(&in, &field))
            return 0;
        if (field.number == 1 && field.wire == WIRE_BYTES)
            name = field.bytes;
    }
    struct list *list = find_list(lists, name);
    if (!list)
        return 1;
    list->count = 0;
    list->kind = KIND_NONE;
    while (again.at < again.end) {
        read_field(&again, &field);
        if (field.number == 2 && field.wire == WIRE_BYTES && !read_feature(field.bytes, list))
            return 0;
    }
    return 1;
}

static int read_example(struct span in, struct list *lists)
{
    struct field example, features;
    for (int i = 0; i < NUM_LISTS; ++i) {
        lists[i].count = 0;
        lists[i].kind = KIND_NONE;
    }
    while (in.at < in.end) {
        if (!read_field(&in, &example))
            return 0;
        if (example.number != 1 || example.wire != WIRE_BYTES)
            continue;
        while (example.bytes.at < example.bytes.end) {
            if (!read_field(&example.bytes, &features))
                return 0;
            if (features.number == 1 && features.wire == WIRE_BYTES && !read_entry(features.bytes, lists))
                return 0;
        }
    }
    return 1;
}

/* ---- examples and ragged arrays ---- */

struct rows { /* see mlbert/data/ragged.py */
    uint16_t *tokens;
    int64_t *offsets;
    uint16_t *masked_positions, *masked_labels;
    int64_t *masked_offsets;
    uint16_t *first_lengths;
    uint8_t *next_sentence;
};

/* Number of `value`s at the start of values[size]. */
static int64_t count_leading(const int32_t *values, int64_t size, int32_t value)
{
    int64_t n = 0;
    for (int same = 1; n + 16 <= size; n += 16) {
        for (int i = 0; i < 16; ++i)
            same &= values[n + i] == value;
        if (!same)
            break;
    }
    while (n < size && values[n] == value)
        ++n;
    return n;
}

/* Sequence `row` from the lists, which have their right sizes; 0 when a value is not allowed. */
static int store_row(const struct list *lists, struct rows *rows, int64_t row, int32_t vocab_size)
{
    const int32_t *mask = lists[INPUT_MASK].values, *segments = lists[SEGMENT_IDS].values;
    const int32_t *ids = lists[INPUT_IDS].values, *weights = lists[MASKED_LM_WEIGHTS].values;
    const int64_t width = lists[INPUT_IDS].count, length = count_leading(mask, width, 1);
    if (length == 0 || count_leading(mask + length, width - length, 0) != width - length)
        return 0;
    const int64_t first = count_leading(segments, length, 0);
    if (count_leading(segments + first, length - first, 1) != length - first)
        return 0;
    uint16_t *tokens = rows->tokens + rows->offsets[row];
    int bad = 0;
    for (int64_t i = 0; i < length; ++i) {
        bad |= ids[i] >= vocab_size;
        tokens[i] = (uint16_t)ids[i];
    }
    int64_t masked = rows->masked_offsets[row];
    for (int64_t i = 0; i < lists[MASKED_LM_WEIGHTS].count; ++i) {
        bad |= weights[i] == BAD_WEIGHT;
        if (weights[i] != 1)
            continue;
        const int32_t position = lists[MASKED_LM_POSITIONS].values[i], label = lists[MASKED_LM_IDS].values[i];
        bad |= position >= length || label >= vocab_size;
        rows->masked_positions[masked] = (uint16_t)position;
        rows->masked_labels[masked++] = (uint16_t)label;
    }
    const int32_t next = lists[NEXT_SENTENCE].values[0];
    if (bad || next > 1)
        return 0;
    rows->offsets[row + 1] = rows->offsets[row] + length;
    rows->masked_offsets[row + 1] = masked;
    rows->first_lengths[row] = (uint16_t)first;
    rows->next_sentence[row] = (uint8_t)next;
    return 1;
}

/*
 * Read the records at bytes[starts[n]] to before bytes[ends[n]], those with wanted[n] only. Every list must have its
 * width. Rows are stored one after another, good[n] says of which records; tokens has room for n * seq_width, masked_*
 * for n * mask_width. Returns the number of rows, -1 without memory.
 */
int64_t tfrecord_parse(const uint8_t *bytes, const int64_t *starts, const int64_t *ends, const uint8_t *wanted, int64_t n,
                       int64_t seq_width, int64_t mask_width, int64_t vocab_size, struct rows *rows, uint8_t *good)
{
    struct list lists[NUM_LISTS];
    int64_t row = 0;
    int32_t *scratch = malloc(sizeof(int32_t) * (size_t)(3 * seq_width + 3 * mask_width + 1)), *next = scratch;
    if (!scratch)
        return -1;
    for (int i = 0; i < NUM_LISTS; ++i) {
        const int of_sequence = i == INPUT_IDS || i == INPUT_MASK || i == SEGMENT_IDS;
        lists[i].capacity = of_sequence ? seq_width : i == NEXT_SENTENCE ? 1 : mask_width;
        lists[i].values = next;
        next += lists[i].capacity;
    }
    rows->offsets[0] = rows->masked_offsets[0] = 0;
    for (int64_t r = 0; r < n; ++r) {
        const struct span data = {bytes + starts[r] + HEADER_BYTES, bytes + ends[r] - FOOTER_BYTES};
        int fine = wanted[r] && read_example(data, lists);
        for (int i = 0; i < NUM_LISTS; ++i)
            fine = fine && lists[i].count == lists[i].capacity &&
                   lists[i].kind == (i == MASKED_LM_WEIGHTS ? KIND_FLOAT : KIND_INT);
        good[r] = (uint8_t)(fine && store_row(lists, rows, row, (int32_t)vocab_size));
        row += good[r];
    }
    free(scratch);
    return row;
}

/* ---- writing ---- */

static int64_t varint_bytes(uint64_t value)
{
    int64_t n = 1;
    while (value >>= 7)
        ++n;
    return n;
}

static uint8_t *put_varint(uint8_t *out, uint64_t value)
{
    for (; value >= 128; value >>= 7)
        *out++ = (uint8_t)(value | 128);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_tag(uint8_t *out, int number, int64_t size)
{
    *out++ = (uint8_t)(number << 3 | WIRE_BYTES);
    return put_varint(out, (uint64_t)size);
}

static int64_t tagged_bytes(int64_t size)
{
    return 1 + varint_bytes((uint64_t)size) + size;
}

static int64_t entry_bytes(int list, int64_t size)
{
    return tagged_bytes((int64_t)strlen(NAMES[list])) + tagged_bytes(tagged_bytes(tagged_bytes(size)));
}

/* Everything of a map entry that comes before its `size` bytes of packed values. */
static uint8_t *put_entry(uint8_t *out, int list, int64_t size)
{
    const int64_t name_bytes = (int64_t)strlen(NAMES[list]);
    out = put_tag(out, 1, entry_bytes(list, size));
    out = put_tag(out, 1, name_bytes);
    memcpy(out, NAMES[list], (size_t)name_bytes);
    out = put_tag(out + name_bytes, 2, tagged_bytes(tagged_bytes(size)));
    out = put_tag(out, list == MASKED_LM_WEIGHTS ? KIND_FLOAT : KIND_INT, tagged_bytes(size));
    return put_tag(out, 1, size);
}

static uint8_t *put_same(uint8_t *out, uint8_t value, int64_t n)
{
    memset(out, value, (size_t)n);
    return out + n;
}

static uint8_t *put_padded(uint8_t *out, const uint16_t *values, int64_t n, int64_t width)
{
    for (int64_t i = 0; i < n; ++i)
        out = put_varint(out, values[i]);
    return put_same(out, 0, width - n);
}

static int64_t padded_bytes(const uint16_t *values, int64_t n, int64_t width)
{
    int64_t size = width - n;
    for (int64_t i = 0; i < n; ++i)
        size += varint_bytes(values[i]);
    return size;
}

static uint8_t *put_example(uint8_t *out, const struct rows *rows, int64_t r, int64_t seq_width, int64_t mask_width)
{
    const int64_t length = rows->offsets[r + 1] - rows->offsets[r], first = rows->first_lengths[r];
    const int64_t masked = rows->masked_offsets[r + 1] - rows->masked_offsets[r];
    const uint16_t *ids = rows->tokens + rows->offsets[r];
    const uint16_t *positions = rows->masked_positions + rows->masked_offsets[r];
    const uint16_t *labels = rows->masked_labels + rows->masked_offsets[r];
    const float one = 1.0f;
    int64_t size[NUM_LISTS], features = 0;
    size[INPUT_IDS] = padded_bytes(ids, length, seq_width);
    size[MASKED_LM_POSITIONS] = padded_bytes(positions, masked, mask_width);
    size[INPUT_MASK] = size[SEGMENT_IDS] = seq_width;
    size[MASKED_LM_WEIGHTS] = 4 * mask_width;
    size[MASKED_LM_IDS] = padded_bytes(labels, masked, mask_width);
    size[NEXT_SENTENCE] = 1;
    for (int i = 0; i < NUM_LISTS; ++i)
        features += tagged_bytes(entry_bytes(i, size[i]));

    out = put_tag(out, 1, features);
    out = put_padded(put_entry(out, INPUT_IDS, size[INPUT_IDS]), ids, length, seq_width);
    out = put_entry(out, MASKED_LM_POSITIONS, size[MASKED_LM_POSITIONS]);
    out = put_padded(out, positions, masked, mask_width);
    out = put_same(put_entry(out, INPUT_MASK, seq_width), 1, length);
    out = put_same(out, 0, seq_width - length);
    out = put_same(put_entry(out, SEGMENT_IDS, seq_width), 0, first);
    out = put_same(put_same(out, 1, length - first), 0, seq_width - length);
    out = put_entry(out, MASKED_LM_WEIGHTS, size[MASKED_LM_WEIGHTS]);
    for (int64_t i = 0; i < masked; ++i, out += 4)
        memcpy(out, &one, 4);
    out = put_same(out, 0, 4 * (mask_width - masked));
    out = put_entry(out, MASKED_LM_IDS, size[MASKED_LM_IDS]);
    out = put_padded(out, labels, masked, mask_width);
    return put_same(put_entry(out, NEXT_SENTENCE, 1), rows->next_sentence[r], 1);
}

/* Write n sequences as records, back to back. `out` has room for the longest possible ones. Returns the bytes. */
int64_t tfrecord_encode(const struct rows *rows, int64_t n, int64_t seq_width, int64_t mask_width, uint8_t *out)
{
    uint8_t *const begin = out;
    for (int64_t r = 0; r < n; ++r) {
        uint8_t *const data = out + HEADER_BYTES;
        uint8_t *const end = put_example(data, rows, r, seq_width, mask_width);
        const uint64_t size = (uint64_t)(end - data);
        memcpy(out, &size, 8);
        const uint32_t length_crc = masked_crc(out, 8), data_crc = masked_crc(data, (int64_t)size);
        memcpy(out + 8, &length_crc, 4);
        memcpy(end, &data_crc, 4);
        out = end + FOOTER_BYTES;
    }
    return out - begin;
}
