/* The library's functions other than forward and backward; see fmha.h. */
#include "device.cuh"
#include "fmha.h"

int check_forward();
int check_backward();

extern "C" int fmha_check(void) {
    const int error = check_forward();
    return error ? error : check_backward();
}

extern "C" const char *fmha_error(int error) { return error_words(error); }

extern "C" size_t fmha_problem_bytes(void) { return sizeof(fmha_problem); }
