/* Write ragged arrays as records, byte for byte like the benchmark's generator. */
#include "tfrecord.h"

#include <string.h>

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
    return tagged_bytes((int64_t)strlen(tfrecord_names[list])) + tagged_bytes(tagged_bytes(tagged_bytes(size)));
}

/* Write the part of a map entry before its `size` bytes of packed values. */
static uint8_t *put_entry(uint8_t *out, int list, int64_t size)
{
    const int64_t name_bytes = (int64_t)strlen(tfrecord_names[list]);
    out = put_tag(out, 1, entry_bytes(list, size));
    out = put_tag(out, 1, name_bytes);
    memcpy(out, tfrecord_names[list], (size_t)name_bytes);
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

/* Write n sequences as consecutive records and return the number of bytes. `out` must fit the longest possible ones. */
int64_t tfrecord_encode(const struct rows *rows, int64_t n, int64_t seq_width, int64_t mask_width, uint8_t *out)
{
    uint8_t *const begin = out;
    for (int64_t r = 0; r < n; ++r) {
        uint8_t *const data = out + HEADER_BYTES;
        uint8_t *const end = put_example(data, rows, r, seq_width, mask_width);
        const uint64_t size = (uint64_t)(end - data);
        memcpy(out, &size, 8);
        const uint32_t length_crc = tfrecord_masked_crc(out, 8), data_crc = tfrecord_masked_crc(data, (int64_t)size);
        memcpy(out + 8, &length_crc, 4);
        memcpy(end, &data_crc, 4);
        out = end + FOOTER_BYTES;
    }
    return out - begin;
}
