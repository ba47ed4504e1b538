/* Passes over float32 data, compiled. Plain C99, no Python: loaded through ctypes.
 *
 * Built with the package where there is a C compiler. native.py holds both in NumPy, with the same bits.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_THIS_CPU __attribute__((target_clones("avx2", "default"))) /* SSE2 alone has no maximum of 32-bit integers */
#else
#define FOR_THIS_CPU
#endif

#define MAGNITUDE 0x7fffffff /* a float32's bits without the sign; they order like the magnitudes they stand for */
#define TABLES 4

/* The version that native.py expects. Raise it with every change of a signature; older builds are ignored. */
const int32_t tared_count_version = 3;

/* out[0]: bits of the largest |x| (NaN above infinity above the finite); out[1]: number of zeros. n < 2^31.
 * Integers: they vectorise, and a thread that flushes subnormals to zero, as some runtimes do, sees them all the same. */
FOR_THIS_CPU void tared_survey(const int32_t *bits, size_t n, int32_t *out) {
  int32_t largest = 0, zeros = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t magnitude = bits[i] & MAGNITUDE;
    largest = magnitude > largest ? magnitude : largest;
    zeros += magnitude == 0;
  }
  out[0] = largest;
  out[1] = zeros;
}

/* Adds to tables[TABLES][bins] the counts of floor(|x| * scale), scale and bins powers of two. The caller has seen to it
 * that all values are finite and their bins below `bins`; the mask keeps a value that changed since within the tables.
 * n < 2^32.
 *
 * Neighbours go to different tables. In one table equal neighbours, such as the zeros of a ReLU, would each wait for
 * the last one's store before they could load the same counter. */
void tared_count(const float *x, size_t n, float scale, uint32_t bins, uint32_t *tables) {
  const uint32_t mask = bins - 1;
  uint32_t *t0 = tables, *t1 = t0 + bins, *t2 = t1 + bins, *t3 = t2 + bins;
  size_t i = 0;
  for (; i + TABLES <= n; i += TABLES) {
    ++t0[(uint32_t)(int32_t)(fabsf(x[i]) * scale) & mask];
    ++t1[(uint32_t)(int32_t)(fabsf(x[i + 1]) * scale) & mask];
    ++t2[(uint32_t)(int32_t)(fabsf(x[i + 2]) * scale) & mask];
    ++t3[(uint32_t)(int32_t)(fabsf(x[i + 3]) * scale) & mask];
  }
  for (; i < n; ++i) ++t0[(uint32_t)(int32_t)(fabsf(x[i]) * scale) & mask];
}
