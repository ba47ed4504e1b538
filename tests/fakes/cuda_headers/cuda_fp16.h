// Stands in for the CUDA toolkit's header of this name when g++ compiles the kernels.
#pragma once
#include "cuda_cpu.h"

struct __half {
    unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

// Exact for every code: a float holds every half.
inline float __half2float(__half value) {
    const unsigned sign = (value.bits & 0x8000u) << 16;
    const unsigned exponent = value.bits >> 10 & 31u, fraction = value.bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float subnormal = (float)fraction * 5.9604644775390625e-8f;  // 2**-24
    return __uint_as_float(sign | __float_as_uint(subnormal));
}
