// Every CUDA kernel of tared: histograms of |x| counted where the tensors live, the search for entropy thresholds, and
// the network input from a camera's frame. New to it? Read calibrate/histogram.py first: the same counting in NumPy.
//
// kernel          reads                                       writes
// abs_histogram   tensors, float or half, by a Tensor table   a row of ROW 64-bit counters for each tensor
// entropy_search  BINS counts and a window for each tensor    a curve of BINS + 1 divergences and one choice for each
// preprocess      a Transform with its taps, a BGR frame      the network input, float or bytes
//
// kernel          grid                  block    dynamic shared memory                same result as
// abs_histogram   any                   THREADS  COUNTERS * 4 (32 KiB)                calibrate/histogram.py
// entropy_search  one block per tensor  THREADS  about (BINS + 1) * 10 + THREADS * 8  calibrate/divergence.py
// preprocess      pixels / THREADS      THREADS  0                                    agent/vision/preprocess.py
//
// compile: nvcc -arch=sm_87 -cubin calibrate/kernels.cu (PyCUDA does so when a CudaExecutor is made, for the GPU that
//          it finds, and keeps the result). BITS, TAIL and THREADS may be given: -DBITS=11
// run:     engines/cuda/kernels.py launches the kernels through PyCUDA; its DESCRIPTOR, and HEADER and TAP of
//          engines/preprocessing.py, mirror the structs below
// check:   on the CPU: make sanitize (ThreadSanitizer, AddressSanitizer, shuffled orders), pytest tests/engines/cuda;
//          on a GPU: make gpu-check (its tests, compute-sanitizer, the benchmark)
//
// nvcc, NVRTC and, in the tests, g++ compile this very file (tests/fakes/cuda_headers holds what g++ lacks). Two compiler
// settings matter and are the defaults: subnormals are not flushed to zero (-ftz=false), and wherever a contracted
// multiply-add could change a last bit the _rn intrinsics forbid it.
#include <cuda_fp16.h>

#ifndef BITS
#define BITS 12  // log2 of the number of bins
#endif

// Octaves counted beyond the guessed range. Two of them let amax lie anywhere within a factor of 8 before a tensor is
// counted again, and with 4096 bins take a block's shared memory to exactly 32 KiB. Two blocks fill the 64 KiB of an
// sm_75 multiprocessor. Later ones run three, each with 1 KiB more for the system, and that leaves 92 of sm_87's 192
// KiB and 156 of sm_90's 256 to the L1 cache. A third and a fourth octave would cost 8 KiB each and a longer flush, and
// buy little: from frame to frame amax rarely moves so far.
#ifndef TAIL
#define TAIL 2
#endif

// Three blocks of 512 fill the 1536 threads of an sm_87 multiprocessor and three quarters of sm_90's 2048. Fewer and
// larger blocks mean fewer flushes of 8192 counters to global memory, but 1024 would leave a third of sm_87 idle.
#ifndef THREADS
#define THREADS 512
#endif

// Threads that shall run on a multiprocessor at once: holds the compiler to 40 registers a thread where it took 58.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
#define RESIDENT_THREADS 1024
#else
#define RESIDENT_THREADS 1536
#endif

typedef unsigned long long u64;

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr unsigned INFINITE = 0x7f800000u;  // the bits of |x| from which x is infinite or NaN
constexpr unsigned LOADS = 4;               // 16-byte loads a thread has in flight

constexpr unsigned BINS = 1u << BITS;
constexpr unsigned OCTAVE = BINS / 2;  // bins of one tail octave: what doubling the range leaves of its upper half
constexpr unsigned COUNTERS = BINS + TAIL * OCTAVE;
constexpr unsigned ZEROS = COUNTERS;  // a tensor's row goes on: zeros, values that are not finite, bits of amax
constexpr unsigned NONFINITE = COUNTERS + 1;
constexpr unsigned AMAX = COUNTERS + 2;
constexpr unsigned ROW = COUNTERS + 3;

static_assert(THREADS % 32 == 0 && BINS % THREADS == 0, "whole warps, and as many bins for every thread");
static_assert(BINS < 1u << 16, "entropy_search numbers bins in 16 bits");

// One tensor of a launch: DESCRIPTOR in engines/cuda/kernels.py. One more ends the table, and its first_vector is the total.
struct Tensor {
    const void* data;  // float or __half, on a 16-byte boundary, as every CUDA allocation is: the host refuses others
    u64 elements;
    u64 first_vector;  // 16-byte vectors, complete or not, of all tensors before it
    float scale;       // 2**(BITS - range_exp)
    unsigned limit;    // the bits of 2**min(range_exp + TAIL, 128): |x| from there on is in no bin
    unsigned is_half;
    unsigned unused;
};
static_assert(sizeof(Tensor) == 40, "the host packs it by hand");

// What one thread has seen of one tensor beside the bins. Most activations follow a ReLU, and half of them are zero:
// zeros stay in a register instead of queueing for bin 0, and the host adds them to it.
struct Tally {
    unsigned zeros, nonfinite;
    unsigned amax;  // bits of the largest finite |x|; as integers they order like the values
};

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The counter of y = |x| * 2**(BITS - range_exp). Below BINS it is floor(y): adding 2**23, rounding down, leaves the
// whole part in the significand. Above, an octave [BINS * 2**k, BINS * 2**(k + 1)) has OCTAVE counters, and the float's
// own bits, exponent and the leading BITS - 1 bits of the significand, number them.
__device__ __forceinline__ unsigned counter_of(float y) {
    constexpr unsigned SHIFT = 24 - BITS, BITS_OF_BINS = (127u + BITS) << 23, BITS_OF_2_23 = 0x4b000000u;
    const unsigned linear = __float_as_uint(__fadd_rd(y, 8388608.0f)) - BITS_OF_2_23;
    const unsigned logarithmic = (__float_as_uint(y) >> SHIFT) - (BITS_OF_BINS >> SHIFT) + BINS;
    return y < (float)BINS ? linear : logarithmic;
}

// One comparison sends every value that is zero, beyond the tail, infinite or NaN past the bins. Equal bins within a
// warp cost one access: an increment whose result nobody reads compiles to ATOMS.POPC.INC, which merges them.
__device__ __forceinline__ void count_value(unsigned* counters, Tally& tally, float x, const Tensor& tensor) {
    const unsigned bits = magnitude(x);
    tally.zeros += bits == 0;
    if (bits - 1u < tensor.limit - 1u) atomicAdd(&counters[counter_of(fabsf(x) * tensor.scale)], 1u);
}

__device__ __forceinline__ void note_magnitude(Tally& tally, unsigned bits) {
    if (bits < INFINITE)
        tally.amax = max(tally.amax, bits);
    else
        ++tally.nonfinite;
}

__device__ __forceinline__ void unpack(const unsigned (&words)[4], float (&values)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) values[k] = __uint_as_float(words[k]);
}

__device__ __forceinline__ void unpack(const unsigned (&words)[4], float (&values)[8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        values[2 * k] = __half2float(__ushort_as_half((unsigned short)(words[k] & 0xffffu)));
        values[2 * k + 1] = __half2float(__ushort_as_half((unsigned short)(words[k] >> 16)));
    }
}

template <int LANES>
__device__ __forceinline__ void count_vector(unsigned* counters, Tally& tally, uint4 vector, const Tensor& tensor) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    float values[LANES];
    unpack(words, values);
    unsigned largest = 0;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        largest = max(largest, magnitude(values[lane]));
        count_value(counters, tally, values[lane], tensor);
    }
    if (largest < INFINITE) {
        tally.amax = max(tally.amax, largest);
    } else {  // rare: a vector with something infinite or NaN in it
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) note_magnitude(tally, magnitude(values[lane]));
    }
}

__device__ __forceinline__ float element(const Tensor& tensor, u64 index) {
    return tensor.is_half ? __half2float(((const __half*)tensor.data)[index]) : ((const float*)tensor.data)[index];
}

// This block's vectors [first, stop) of a tensor. LANES: elements of a 16-byte vector, 4 floats or 8 halves.
template <int LANES>
__device__ __forceinline__ void count_vectors(unsigned* counters, Tally& tally, const Tensor& tensor, u64 first,
                                              u64 stop) {
    const uint4* vectors = (const uint4*)tensor.data;
    const u64 complete = tensor.elements / LANES, end = stop < complete ? stop : complete;
    u64 i = first + threadIdx.x;
    for (; i + (LOADS - 1) * THREADS < end; i += LOADS * THREADS) {
        uint4 loaded[LOADS];
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) loaded[k] = __ldcs(vectors + i + k * THREADS);
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) count_vector<LANES>(counters, tally, loaded[k], tensor);
    }
    for (; i < end; i += THREADS) count_vector<LANES>(counters, tally, __ldcs(vectors + i), tensor);
    if (stop > complete) {  // the elements of the last, incomplete vector, one for each thread
        const u64 index = complete * LANES + threadIdx.x;
        if (index < tensor.elements) {
            const float x = element(tensor, index);
            count_value(counters, tally, x, tensor);
            note_magnitude(tally, magnitude(x));
        }
    }
}

// A warp's tallies into the tensor's row, by one thread: 32 different addends to one address would queue. Not by way of
// the block: three more counters would be a few bytes more shared memory than sm_75 has for two blocks, and what 16
// warps add here is little beside the thousands of counters of a flush.
__device__ __forceinline__ void add_tally(u64* row, Tally tally) {
    for (int distance = 16; distance > 0; distance /= 2) {
        tally.zeros += __shfl_down_sync(FULL_WARP, tally.zeros, distance);
        tally.nonfinite += __shfl_down_sync(FULL_WARP, tally.nonfinite, distance);
        tally.amax = max(tally.amax, __shfl_down_sync(FULL_WARP, tally.amax, distance));
    }
    if (threadIdx.x % 32 == 0) {
        if (tally.zeros != 0) atomicAdd(&row[ZEROS], (u64)tally.zeros);
        if (tally.nonfinite != 0) atomicAdd(&row[NONFINITE], (u64)tally.nonfinite);
        atomicMax(&row[AMAX], (u64)tally.amax);
    }
}

// The block's 32-bit counters into the tensor's 64-bit row, and back to zero for the next tensor.
__device__ __forceinline__ void flush(unsigned* counters, u64* row) {
    for (unsigned i = threadIdx.x; i < COUNTERS; i += THREADS) {
        const unsigned count = counters[i];
        if (count == 0) continue;
        atomicAdd(&row[i], (u64)count);
        counters[i] = 0;
    }
}

// The last tensor that begins at or before this vector.
__device__ __forceinline__ int tensor_at(const Tensor* tensors, int count, u64 vector) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tensors[middle].first_vector <= vector)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Counts `count` tensors into their rows of ROW counters, which the host has zeroed. Blocks of THREADS take equal,
// contiguous shares of all vectors together, so any grid is right and small tensors do not leave blocks idle.
// A block must meet fewer than 2**32 values. Dynamic shared memory: COUNTERS * 4 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS)
abs_histogram(const Tensor* tensors, int count, u64* rows) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    unsigned* counters = (unsigned*)shared_memory;
    for (unsigned i = threadIdx.x; i < COUNTERS; i += THREADS) counters[i] = 0;
    const u64 total = tensors[count].first_vector;
    const u64 end = total * (blockIdx.x + 1) / gridDim.x;
    u64 begin = total * blockIdx.x / gridDim.x;
    __syncthreads();
    for (int t = tensor_at(tensors, count, begin); begin < end; ++t) {
        const Tensor tensor = tensors[t];
        const u64 stop = min(end, tensors[t + 1].first_vector);
        u64* row = rows + (u64)t * ROW;
        if (begin == stop) continue;  // an empty tensor
        Tally tally = {0, 0, 0};
        if (tensor.is_half)
            count_vectors<8>(counters, tally, tensor, begin - tensor.first_vector, stop - tensor.first_vector);
        else
            count_vectors<4>(counters, tally, tensor, begin - tensor.first_vector, stop - tensor.first_vector);
        add_tally(row, tally);
        __syncthreads();
        flush(counters, row);
        __syncthreads();
        begin = stop;
    }
}

// ---- entropy thresholds -----------------------------------------------------------------------------------

constexpr unsigned LEVELS = 128;            // magnitudes of an int8 grid: the groups the objective merges bins into
constexpr unsigned SHARE = BINS / THREADS;  // bins a thread sums
constexpr double TIE = 1e-13;               // divergences this close are equal, and the widest candidate wins

// ln x for a normal x > 0, from correctly rounded + - * / alone, in one fixed order: the same bits on every GPU, on
// the CPU and in NumPy, which no libm promises. x = m * 2**e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh s,
// s = (m - 1) / (m + 1), by its series up to s**21; the error is below 2 ulp.
__device__ __forceinline__ double fixed_log(double x) {
    const long long bits = __double_as_longlong(x);
    int exponent = (int)(bits >> 52) - 1023;
    double m = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3ff0000000000000ll);
    if (m > 1.4142135623730951) {
        m = __dmul_rn(m, 0.5);
        ++exponent;
    }
    const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0)), z = __dmul_rn(s, s);
    double series = 1.0 / 21;
#pragma unroll
    for (int k = 19; k >= 1; k -= 2) series = __dadd_rn(__dmul_rn(series, z), 1.0 / k);
    return __dadd_rn(__dmul_rn((double)exponent, 0.6931471805599453), __dmul_rn(__dmul_rn(2.0, s), series));
}

__device__ __forceinline__ double xlogx(u64 count) {
    const double x = (double)count;
    return count > 1 ? __dmul_rn(x, fixed_log(x)) : 0.0;
}

// NVIDIA's rule: bin 0 counts as bin 1, so that the zeros of a ReLU do not decide.
__device__ __forceinline__ u64 bin_count(const u64* counts, unsigned bin) { return counts[bin == 0 ? 1 : bin]; }

// Prefix sums over the bins: below[i] = counts in bins < i, filled[i] = how many of those bins are not empty.
struct Prefix {
    u64* below;              // BINS + 1
    unsigned short* filled;  // BINS + 1
};

// Fills the prefix sums, and entropy[i] = sum of c ln c over bins < i - 1, i = 1..BINS. Every thread sums its SHARE of
// bins, then its predecessors' totals in their order: the rounding depends on THREADS, never on the schedule.
__device__ __forceinline__ void sum_bins(const u64* counts, Prefix prefix, double* totals, double* entropy) {
    const unsigned first = threadIdx.x * SHARE;
    u64 mass = 0;
    unsigned filled = 0;
    double sum = 0.0;
    for (unsigned bin = first; bin < first + SHARE; ++bin) {
        mass += bin_count(counts, bin);
        filled += bin_count(counts, bin) != 0;
        sum = __dadd_rn(sum, xlogx(bin_count(counts, bin)));
    }
    prefix.below[first + SHARE] = mass;
    prefix.filled[first + SHARE] = (unsigned short)filled;
    totals[threadIdx.x] = sum;
    __syncthreads();
    mass = 0, filled = 0, sum = 0.0;
    for (unsigned thread = 0; thread < threadIdx.x; ++thread) {
        mass += prefix.below[(thread + 1) * SHARE];
        filled += prefix.filled[(thread + 1) * SHARE];
        sum = __dadd_rn(sum, totals[thread]);
    }
    __syncthreads();
    double own = 0.0;
    for (unsigned bin = first; bin < first + SHARE; ++bin) {
        prefix.below[bin] = mass;
        prefix.filled[bin] = (unsigned short)filled;
        entropy[bin + 1] = __dadd_rn(sum, own);
        mass += bin_count(counts, bin);
        filled += bin_count(counts, bin) != 0;
        own = __dadd_rn(own, xlogx(bin_count(counts, bin)));
    }
    if (threadIdx.x == THREADS - 1) {
        prefix.below[BINS] = mass;
        prefix.filled[BINS] = (unsigned short)filled;
    }
    __syncthreads();
}

// sum over the groups of (group's mass) * ln(its mean over non-empty bins), where the clipped tail adds to the mass,
// but not to the mean, of the last one. Group g of `kept` bins starts at bin ceil(g * kept / LEVELS).
__device__ __forceinline__ double cross_entropy(Prefix prefix, unsigned kept, u64 tail) {
    u64 below = 0;
    unsigned filled = 0;
    double sum = 0.0, log_mean = 0.0;
    for (unsigned group = 1; group <= LEVELS; ++group) {
        const unsigned edge = (group * kept + LEVELS - 1) / LEVELS;
        const u64 mass = prefix.below[edge] - below;
        const unsigned bins = prefix.filled[edge] - filled;
        below += mass;
        filled += bins;
        log_mean = mass == 0 ? 0.0 : fixed_log(__ddiv_rn((double)mass, (double)bins));
        sum = __dadd_rn(sum, __dmul_rn((double)mass, log_mean));
    }
    return __dadd_rn(sum, __dmul_rn((double)tail, log_mean));
}

// KL(P || Q) in nats of keeping the first `kept` bins: calibrate.divergence.kl_divergence. Infinite where Q is zero and
// P is not, and where nothing is kept.
__device__ __forceinline__ double divergence_of(Prefix prefix, unsigned kept, double entropy) {
    const u64 all = prefix.below[BINS], inside = prefix.below[kept], last = inside - prefix.below[kept - 1];
    const u64 tail = all - inside;
    if (inside == 0 || (last == 0 && tail != 0)) return __longlong_as_double(0x7ff0000000000000ll);
    const double total = (double)all;
    const double own = __dadd_rn(entropy, xlogx(last + tail));
    const double ratio = __ddiv_rn(__dsub_rn(own, cross_entropy(prefix, kept, tail)), total);
    return __dadd_rn(ratio, __dsub_rn(fixed_log((double)inside), fixed_log(total)));
}

// The least of every thread's value, in all threads. The barrier also publishes what the threads wrote before.
__device__ __forceinline__ double block_min(double value, double* warp_minima) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmin(value, __shfl_down_sync(FULL_WARP, value, distance));
    if (threadIdx.x % 32 == 0) warp_minima[threadIdx.x / 32] = value;
    __syncthreads();
    double least = warp_minima[0];
    for (unsigned warp = 1; warp < THREADS / 32; ++warp) least = fmin(least, warp_minima[warp]);
    return least;
}

// One block a tensor. counts: BINS a tensor. windows: lowest and highest number of bins to keep, a pair a tensor.
// divergence: BINS + 1 a tensor, indexed by bins kept, infinite outside the window. chosen: zeroed by the host; the
// largest candidate whose divergence is the least or ties with it, and still 0 where none is finite.
// The candidates of a warp are neighbours: their group edges are the same bins or next to each other, in few banks.
// Dynamic shared memory: (BINS + 1) * 8, (BINS + 1) * 2 rounded up to 8, and THREADS * 8 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
entropy_search(const u64* counts, const int* windows, double* divergence, int* chosen) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Prefix prefix;
    prefix.below = (u64*)shared_memory;
    double* partial = (double*)(prefix.below + BINS + 1);
    prefix.filled = (unsigned short*)(partial + THREADS);
    double* curve = divergence + (u64)blockIdx.x * (BINS + 1);
    sum_bins(counts + (u64)blockIdx.x * BINS, prefix, partial, curve);

    const int low = max(windows[2 * blockIdx.x], (int)LEVELS), high = windows[2 * blockIdx.x + 1];
    double mine = __longlong_as_double(0x7ff0000000000000ll);
    for (int kept = threadIdx.x; kept <= (int)BINS; kept += THREADS) {
        const bool competes = low <= kept && kept <= high;
        curve[kept] = competes ? divergence_of(prefix, kept, curve[kept]) : __longlong_as_double(0x7ff0000000000000ll);
        mine = fmin(mine, curve[kept]);
    }
    const double least = block_min(mine, partial);
    if (isinf(least)) return;
    int widest = 0;
    for (int kept = threadIdx.x; kept <= (int)BINS; kept += THREADS)
        if (curve[kept] <= least + TIE) widest = kept;
    for (int distance = 16; distance > 0; distance /= 2)
        widest = max(widest, __shfl_down_sync(FULL_WARP, widest, distance));
    if (threadIdx.x % 32 == 0) atomicMax(&chosen[blockIdx.x], widest);
}

// ---- preprocessing ----------------------------------------------------------------------------------------

constexpr int RGB = 1, GRAY = 2;                        // colours of a network input; 0 is BGR, the frame's own
constexpr int BLUE = 3735, GREEN = 19235, RED = 9798;  // what they weigh in OpenCV's BGR2GRAY, of 2**15

// Where a column or a row of the network input comes from: the first bytes of two pixels of a row, or two rows of the
// frame, and what they weigh, of 2**11. Negative where there is but padding. TAP in engines/preprocessing.py.
struct __align__(16) Tap {
    int first, second, first_weight, second_weight;
};

// HEADER in engines/preprocessing.py. The taps of every column of the network input follow it, then those of every row.
struct __align__(16) Transform {
    int width, height;  // of the network input
    int pad, color;
    float gain[3], bias[3];  // by channel of the network input
    int channels_last, is_bytes;  // NHWC instead of NCHW; uint8 instead of float32
};
static_assert(sizeof(Tap) == 16 && sizeof(Transform) == 48, "the host packs them by hand");

// One channel as OpenCV's INTER_LINEAR makes it of bytes, step by step and therefore to the last level: the horizontal
// sums lose 4 bits, their products with the vertical weights 16 each, and the sum of these is rounded at the last 2.
__device__ __forceinline__ int interpolate(const unsigned char* upper, const unsigned char* lower, const Tap& column,
                                           const Tap& row) {
    const int above = upper[column.first] * column.first_weight + upper[column.second] * column.second_weight;
    const int below = lower[column.first] * column.first_weight + lower[column.second] * column.second_weight;
    return (((above >> 4) * row.first_weight >> 16) + ((below >> 4) * row.second_weight >> 16) + 2) >> 2;
}

// A BGR frame, of rows that begin row_bytes apart, to the network input of 3 channels or 1, float or bytes, channels first
// or last. One thread a pixel, in as many blocks as that takes. Neighbours write next to each other, channel by channel;
// the frame's bytes they read come from the cache, since every pixel of it is read by several threads, or else by every
// few threads one.
extern "C" __global__ void __launch_bounds__(THREADS)
preprocess(const Transform* transform, const unsigned char* frame, int row_bytes, void* input) {
    const unsigned width = transform->width, pixels = width * transform->height;
    const unsigned pixel = blockIdx.x * THREADS + threadIdx.x;
    if (pixel >= pixels) return;
    const Tap* taps = (const Tap*)(transform + 1);
    const Tap column = taps[pixel % width], row = taps[width + pixel / width];
    int levels[3] = {transform->pad, transform->pad, transform->pad};
    if (column.first >= 0 && row.first >= 0) {
        const unsigned char* upper = frame + (long long)row.first * row_bytes;
        const unsigned char* lower = frame + (long long)row.second * row_bytes;
#pragma unroll
        for (int k = 0; k < 3; ++k) levels[k] = interpolate(upper + k, lower + k, column, row);
    }
    const int color = transform->color, channels = color == GRAY ? 1 : 3;
    const int leading = color == GRAY  ? (levels[0] * BLUE + levels[1] * GREEN + levels[2] * RED + (1 << 14)) >> 15
                      : color == RGB ? levels[2]
                                     : levels[0];
    const int ordered[3] = {leading, levels[1], color == RGB ? levels[0] : levels[2]};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        if (k >= channels) break;
        const u64 place = transform->channels_last ? (u64)pixel * channels + k : (u64)k * pixels + pixel;
        if (transform->is_bytes)
            ((unsigned char*)input)[place] = (unsigned char)ordered[k];
        else
            ((float*)input)[place] =
                __fadd_rn(__fmul_rn((float)ordered[k], transform->gain[k]), transform->bias[k]);
    }
}
