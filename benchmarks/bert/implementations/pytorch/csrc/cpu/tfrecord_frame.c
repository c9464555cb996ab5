/*
 * TFRecord framing: checksums and record boundaries.
 *
 * A record is: uint64 length, uint32 masked CRC32C of the length, the data, uint32 masked CRC32C of the data.
 */
#include "tfrecord.h"

#include <string.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

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

/* Table-driven CRC32C of bytes[size], eight bytes at a time. */
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

/* CRC32C of bytes[size], with the processor's instruction if the library is compiled for it. */
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

uint32_t tfrecord_masked_crc(const uint8_t *bytes, int64_t size)
{
    const uint32_t crc = tfrecord_crc32c(bytes, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static int has_crc(const uint8_t *bytes, int64_t size)
{
    uint32_t stored;
    memcpy(&stored, bytes + size, 4);
    return stored == tfrecord_masked_crc(bytes, size);
}

/*
 * Find the complete records at the start of bytes[size], at most `most`, by their lengths. starts[n + 1]: first byte of
 * each record, then the end of the last. Returns n. Only the checksums of the lengths are verified.
 */
int64_t tfrecord_scan(const uint8_t *bytes, int64_t size, int64_t most, int64_t *starts)
{
    int64_t n = 0, at = 0;
    for (starts[0] = 0; n < most && size - at >= HEADER_BYTES + FOOTER_BYTES && has_crc(bytes + at, 8); starts[++n] = at) {
        uint64_t length;
        memcpy(&length, bytes + at, 8);
        if (length > (uint64_t)(size - at - HEADER_BYTES - FOOTER_BYTES))
            break;
        at += HEADER_BYTES + (int64_t)length + FOOTER_BYTES;
    }
    return n;
}

int tfrecord_is_intact(const uint8_t *bytes, int64_t size)
{
    const int64_t expected = size - HEADER_BYTES - FOOTER_BYTES;
    int64_t length;
    if (expected < 0)
        return 0;
    memcpy(&length, bytes, 8);
    return length == expected && has_crc(bytes, 8) && has_crc(bytes + HEADER_BYTES, length);
}
