/* Parse the benchmark's tf.train.Examples, in any encoding that protocol buffers allow, into ragged arrays. */
#include "tfrecord.h"

#include <stdlib.h>
#include <string.h>

#define TOO_LARGE 65536 /* replaces every integer that no feature may hold */
#define BAD_WEIGHT 2    /* replaces every weight other than 0 and 1 */

const char *const tfrecord_names[NUM_LISTS] = {"input_ids",         "masked_lm_positions", "input_mask",
                                               "segment_ids",       "masked_lm_weights",   "masked_lm_ids",
                                               "next_sentence_labels"};

struct span {
    const uint8_t *at, *end;
};

struct field {
    uint64_t number, value; /* value: for WIRE_VARINT and WIRE_32 */
    struct span bytes;      /* for WIRE_BYTES */
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

/* Read the next field of a message; 0 if the bytes are not a message. */
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
    ++list->count; /* the count detects one too many */
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
    /* Eight bytes at a time: eight one-byte values, as in masks, or one value of up to three bytes, as every id is. */
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

/* tf.train.Int64List or FloatList: append its values to those already read. */
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

/* tf.train.Feature: one of three lists; the last one wins. */
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
        if (strlen(tfrecord_names[i]) == size && !memcmp(tfrecord_names[i], name.at, size))
            return lists + i;
    return NULL;
}

/* An entry of the map from names to features. A later entry with the same name replaces an earlier one. */
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

/* Store sequence `row` from the lists, whose sizes are correct; 0 if a value is not allowed. */
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
 * Read the records bytes[starts[n]:ends[n]]. Their checksums must be correct, and every list must have its expected
 * width. Rows are stored consecutively; good[n] marks the records they came from. tokens has room for n * seq_width and
 * masked_* for n * mask_width. Returns the number of rows, or -1 if out of memory.
 */
int64_t tfrecord_parse(const uint8_t *bytes, const int64_t *starts, const int64_t *ends, int64_t n, int64_t seq_width,
                       int64_t mask_width, int64_t vocab_size, struct rows *rows, uint8_t *good)
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
        int fine = tfrecord_is_intact(bytes + starts[r], ends[r] - starts[r]) && read_example(data, lists);
        for (int i = 0; i < NUM_LISTS; ++i)
            fine = fine && lists[i].count == lists[i].capacity &&
                   lists[i].kind == (i == MASKED_LM_WEIGHTS ? KIND_FLOAT : KIND_INT);
        good[r] = (uint8_t)(fine && store_row(lists, rows, row, (int32_t)vocab_size));
        row += good[r];
    }
    free(scratch);
    return row;
}
