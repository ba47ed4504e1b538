/* From a frame of bytes to a network input of floats in one pass, row by row, so that all between them stays in the
 * processor's nearest cache. preprocessing.py says what the numbers are and how they are laid out.
 *
 * C99 but for vectors, which GCC and Clang have for every processor. No Python: loaded through ctypes.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read from bytes as on a little-endian machine; without this the passes in Python serve"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_THIS_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_CPU
#endif

#ifdef __GNUC__
#define INSIDE static inline __attribute__((always_inline)) /* else it would be of no clone */
#endif

#define COLUMNS 4 /* at a time */
#define CHANNELS 3
#define LANES 4 /* of a column: blue, red, green, and what comes of nothing */

typedef uint64_t columns __attribute__((vector_size(8 * COLUMNS)));
typedef uint16_t lanes __attribute__((vector_size(2 * LANES * COLUMNS)));
typedef columns columns_anywhere __attribute__((aligned(8), may_alias)); /* as arrays of NumPy lie */
typedef lanes lanes_anywhere __attribute__((aligned(2), may_alias));

/* To be raised with every change of `struct plan`. An older build is left alone. */
const int32_t tared_resize_version = 1;

/* Where a row comes from: two rows of the frame, and what they weigh, of 2^11. */
struct tap {
  int32_t first, second, first_weight, second_weight;
};

/* Everything but the frame. Sizes are of the part of the network input that shows the frame; `padded` is its width, rounded
 * up to COLUMNS. */
struct plan {
  size_t width, padded, height;
  const int32_t *offsets;              /* [padded] byte of a row from which eight may be read, */
  const uint64_t *shifts;              /* [padded] of whose 64 bits so many come before the first pixel of the column */
  const uint16_t *weights;             /* [padded / COLUMNS][4][COLUMNS][LANES]: of the first pixel, 16 * whole + rest, */
                                       /* and of the second, likewise */
  const struct tap *rows;              /* [height] */
  float gain[CHANNELS], bias[CHANNELS];  /* of blue, red, green */
  float *planes[CHANNELS];             /* where the first row of each begins */
  size_t stride;                       /* floats from a row of a plane to the next */
  int16_t *across[2];                  /* [padded][LANES], and scratch, as is what follows */
  uint32_t *levels;                    /* [padded] */
};

INSIDE uint64_t load(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

/* A row of the frame, resized, in units of 2^-7. What a weight multiplies has 8 bits and a weight 12: it is taken in two
 * parts, so that all products fit into 16 bits, as do their sums, for two weights make 2^11. */
INSIDE void resize_row(const struct plan *plan, const uint8_t *row, int16_t *restrict across) {
  const columns third = {0xff00000000, 0xff00000000, 0xff00000000, 0xff00000000};
  const columns others = {0xff00ff, 0xff00ff, 0xff00ff, 0xff00ff};
  const int32_t *offset = plan->offsets;
  const columns_anywhere *shift = (const columns_anywhere *)plan->shifts;
  const lanes_anywhere *weight = (const lanes_anywhere *)plan->weights;
  lanes_anywhere *out = (lanes_anywhere *)across;
  for (size_t n = plan->padded / COLUMNS; n > 0; --n, offset += COLUMNS, weight += 4) {
    const columns words = {load(row + offset[0]), load(row + offset[1]), load(row + offset[2]), load(row + offset[3])};
    const columns pixels = words >> *shift++;
    const lanes first = (lanes)((pixels & others) | (pixels << 24 & third));
    const lanes second = (lanes)((pixels >> 24 & others) | (pixels & third));
    *out++ = first * weight[0] + second * weight[2] + ((first * weight[1] + second * weight[3]) >> 4);
  }
}

/* What lies between two resized rows: the levels of each column's channels, a byte each. */
INSIDE void blend(const int16_t *restrict upper, const int16_t *restrict lower, int16_t first, int16_t second,
                         uint8_t *restrict levels, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const int16_t above = (int16_t)((upper[i] * first) >> 16), below = (int16_t)((lower[i] * second) >> 16);
    levels[i] = (uint8_t)((int16_t)(above + below + 2) >> 2);
  }
}

INSIDE void spread(const uint32_t *restrict levels, unsigned shift, float gain, float bias, float *restrict out, size_t n) {
  for (size_t x = 0; x < n; ++x) out[x] = (float)(int32_t)((levels[x] >> shift) & 255) * gain + bias;
}

/* The frame's rows begin row_bytes apart. */
FOR_THIS_CPU void tared_resize(const uint8_t *frame, ptrdiff_t row_bytes, const struct plan *plan) {
  int32_t held[2] = {-1, -1}; /* which rows of the frame lie in across[2] */
  for (size_t y = 0; y < plan->height; ++y) {
    const struct tap tap = plan->rows[y];
    const int32_t wanted[2] = {tap.first, tap.second};
    int at[2];
    for (int k = 0; k < 2; ++k) {
      at[k] = held[1] == wanted[k];
      if (held[at[k]] == wanted[k]) continue;
      at[k] = k == 0 ? held[0] == wanted[1] : !at[0]; /* where the other one does not lie */
      resize_row(plan, frame + wanted[k] * row_bytes, plan->across[at[k]]);
      held[at[k]] = wanted[k];
    }
    blend(plan->across[at[0]], plan->across[at[1]], (int16_t)tap.first_weight, (int16_t)tap.second_weight,
          (uint8_t *)plan->levels, LANES * plan->padded);
    for (unsigned c = 0; c < CHANNELS; ++c)
      spread(plan->levels, 8 * c, plan->gain[c], plan->bias[c], plan->planes[c] + y * plan->stride, plan->width);
  }
}
