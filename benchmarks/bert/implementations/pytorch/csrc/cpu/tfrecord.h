/*
 * Shared by tfrecord_frame.c, tfrecord_read.c and tfrecord_write.c: TFRecord framing, CRC32C, and conversion between
 * the benchmark's tf.train.Example and ragged arrays. Called through ctypes by mlbert/data/formats/tfrecord_native.py.
 * mlbert/data/formats/tfrecord_plain.py does the same in Python, and builds the error message for any input rejected
 * here. Little-endian machines only.
 */
#ifndef MLBERT_TFRECORD_H
#define MLBERT_TFRECORD_H
#include <stdint.h>

enum { HEADER_BYTES = 12, FOOTER_BYTES = 4 }; /* of a record */
enum { INPUT_IDS, MASKED_LM_POSITIONS, INPUT_MASK, SEGMENT_IDS, MASKED_LM_WEIGHTS, MASKED_LM_IDS, NEXT_SENTENCE, NUM_LISTS };
enum { KIND_NONE = 0, KIND_FLOAT = 2, KIND_INT = 3 }; /* field numbers of tf.train.Feature */
enum { WIRE_VARINT, WIRE_64, WIRE_BYTES, WIRE_32 = 5 };

/* In the order of the benchmark's files. No two names have the same length. */
extern const char *const tfrecord_names[NUM_LISTS];

struct rows { /* see mlbert/data/formats/ragged.py */
    uint16_t *tokens;
    int64_t *offsets;
    uint16_t *masked_positions, *masked_labels;
    int64_t *masked_offsets;
    uint16_t *first_lengths;
    uint8_t *next_sentence;
};

/* CRC32C of bytes[size], rotated and shifted as TFRecords store it. */
uint32_t tfrecord_masked_crc(const uint8_t *bytes, int64_t size);

/* Whether bytes[size] is one complete record with correct checksums. */
int tfrecord_is_intact(const uint8_t *bytes, int64_t size);

#endif
