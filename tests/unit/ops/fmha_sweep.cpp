/* Run csrc/fmha, emulated, with AddressSanitizer on buffers of exactly the documented sizes. The arguments are the
lengths of the sequences. The exit code is 0 if nothing was reported and all results were written. */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fmha.h"

extern "C" const char *emulation_reports(void);

template <class Number> static Number *buffer(size_t count) {
    void *memory = malloc(count * sizeof(Number));
    memset(memory, 0xFF, count * sizeof(Number)); /* NaN in every type */
    return static_cast<Number *>(memory);
}

/* Return whether all 16-bit floats are finite. */
static bool all_finite(const uint16_t *numbers, size_t count, bool is_bfloat16) {
    const uint16_t exponent = is_bfloat16 ? 0x7F80 : 0x7C00;
    for (size_t i = 0; i < count; i++) {
        if ((numbers[i] & exponent) == exponent) return false;
    }
    return true;
}

int main(int count, char **words) {
    const int heads = 2, tail = 3, sequences = count - 1;
    int32_t *bounds = buffer<int32_t>(sequences + 1);
    bounds[0] = 0;
    int longest = 0;
    for (int i = 0; i < sequences; i++) {
        const int length = atoi(words[i + 1]);
        bounds[i + 1] = bounds[i] + length;
        longest = length > longest ? length : longest;
    }
    const size_t tokens = bounds[sequences] + tail, numbers = tokens * heads * 64;
    int32_t *rows = buffer<int32_t>(tokens);
    for (size_t i = 0; i < tokens; i++) rows[i] = 7 * i;
    float *slopes = buffer<float>(heads), *log_sums = buffer<float>(heads * tokens);
    slopes[0] = 0.25f, slopes[1] = 0.0f;
    uint32_t *key = buffer<uint32_t>(1);
    *key = 12345;
    uint16_t *qkv = buffer<uint16_t>(3 * numbers), *d_out = buffer<uint16_t>(numbers);
    float *d_query = longest > FMHA_KEYS_AT_ONCE ? buffer<float>(numbers) : nullptr;
    bool good = true;
    for (int is_bfloat16 = 0; is_bfloat16 < 2; is_bfloat16++) {
        /* Random magnitudes from 1 to 2, of either sign. */
        const uint16_t one = is_bfloat16 ? 0x3F80 : 0x3C00, fraction = is_bfloat16 ? 0x7F : 0x3FF;
        auto draw = [&] { return static_cast<uint16_t>(one | (rand() & fraction) | (rand() & 1) << 15); };
        for (size_t i = 0; i < 3 * numbers; i++) qkv[i] = draw();
        for (size_t i = 0; i < numbers; i++) d_out[i] = draw();
        uint16_t *out = buffer<uint16_t>(numbers), *d_qkv = buffer<uint16_t>(3 * numbers);
        const fmha_problem problem = {qkv, bounds, rows, slopes, key, 0, 26, static_cast<int32_t>(tokens), sequences, heads,
                                      is_bfloat16};
        good = good && fmha_check() == 0 && fmha_forward(&problem, out, log_sums, nullptr) == 0;
        good = good && fmha_backward(&problem, out, log_sums, d_out, d_query, d_qkv, nullptr) == 0;
        good = good && all_finite(out, numbers, is_bfloat16) && all_finite(d_qkv, 3 * numbers, is_bfloat16);
        free(out), free(d_qkv);
    }
    const char *reports = emulation_reports();
    printf("%s%s\n", reports, good ? "all written" : "failed");
    free(bounds), free(rows), free(slopes), free(log_sums), free(key), free(qkv), free(d_out), free(d_query);
    return good && !*reports ? 0 : 1;
}
