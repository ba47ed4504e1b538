// CUDA C++ for g++: the keywords, and those of the device functions that calibrate/kernels.cu uses.
// Compile with -ffp-contract=off, or a product and a sum could become one rounding.
#pragma once
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __shared__ __thread  // a block has its OS thread: "extern __shared__ ... shared_memory[]" is that of fibers.cpp
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define threadIdx fibers::thread_index
#define blockIdx fibers::block_index
#define blockDim fibers::block_size
#define gridDim fibers::grid_size

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

// ---- bits -------------------------------------------------------------------------------------------------

template <class To, class From>
To bits_as(From value) {
    To bits{};
    static_assert(sizeof(From) <= sizeof(To), "nothing may be lost");
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }

// ---- arithmetic -------------------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

inline float __fadd_rd(float a, float b) {
    const double exact = (double)a + b;  // exact only for exponents within 29 of each other, else rounded to nearest,
    const float nearest = (float)exact;  // which for a < 2**23 and b = 2**23 still lies in the right unit interval
    return (double)nearest > exact ? std::nextafterf(nearest, -INFINITY) : nearest;
}

template <class A, class B>
auto min(A a, B b) -> decltype(a + b) {
    return a < b ? a : b;
}

template <class A, class B>
auto max(A a, B b) -> decltype(a + b) {
    return a > b ? a : b;
}

using std::isinf;

// ---- memory -----------------------------------------------------------------------------------------------

template <class T>
T __ldcs(const T* address) {
    return *address;
}

template <class T>
T atomicAdd(T* address, T value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicMax(T* address, T value) {
    constexpr int ORDER = __ATOMIC_RELAXED;
    T old = __atomic_load_n(address, ORDER);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, ORDER, ORDER)) {
    }
    return old;
}

// ---- threads ----------------------------------------------------------------------------------------------

inline void __syncthreads() { fibers::barrier(); }

template <class T>
T from_word(fibers::Word word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
    const fibers::Word* values = fibers::exchange(mask, bits_as<fibers::Word>(value));
    const unsigned source = fibers::lane() + distance;
    return source < fibers::WARP ? from_word<T>(values[source]) : value;
}

// ---- launches ---------------------------------------------------------------------------------------------

template <class... Arguments, size_t... Position>
int launch_kernel(void (*kernel)(Arguments...), std::index_sequence<Position...>, const fibers::Launch& launch,
                  void** arguments, char* error, size_t error_bytes) {
    using Call = std::pair<void (*)(Arguments...), std::tuple<Arguments...>>;
    Call call{kernel, {*static_cast<Arguments*>(arguments[Position])...}};
    auto body = [](void* memory) {
        Call* call = static_cast<Call*>(memory);
        std::apply(call->first, call->second);
    };
    return fibers::run(launch, body, &call, error, error_bytes);
}

template <class... Arguments>
constexpr std::index_sequence_for<Arguments...> positions(void (*)(Arguments...)) {
    return {};
}

// extern "C" int launch_NAME(launch, pointers to the arguments, error, error_bytes), as fibers::run
#define EXPORT_KERNEL(name)                                                                              \
    extern "C" int launch_##name(const fibers::Launch* launch, void** arguments, char* error, size_t bytes) { \
        return launch_kernel(name, positions(name), *launch, arguments, error, bytes);                   \
    }
