/* Unpacks counts from their Rice-coded differences, and adds counts up. count_codec.py describes the layout and holds the
 * first in NumPy, histogram.py the second.
 *
 * C99 but for counting trailing zeros, which every compiler that builds it has. Whatever the bytes are, nothing is read
 * or written out of bounds: they come from other machines.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read from bytes as on a little-endian machine; without this the passes in Python serve"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_THIS_CPU __attribute__((target_clones("bmi2", "default"))) /* its shifts are cheaper */
#else
#define FOR_THIS_CPU
#endif

#define BLOCK 64
#define SAME 255
#define TARED_MALFORMED 1

static inline uint64_t load(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

/* The unary parts, of `end` bits: `word` has those ones of the 64 before `behind` that have not been taken, `from` is
 * where the next number begins. */
struct unary {
  const uint8_t *data;
  uint64_t end, behind, from, word;
  int ended; /* more numbers were asked for than there are */
};

/* How many zeros there are before the next one, which is taken too; 0 where there is none. The next word hangs on no count
 * of zeros, so that the processor has several numbers under way. */
static inline uint64_t next(struct unary *bits) {
  while (bits->word == 0) {
    if (bits->behind >= bits->end) {
      bits->ended = 1;
      return 0;
    }
    bits->word = load(bits->data + (bits->behind >> 3));
    bits->behind += 64;
  }
  const uint64_t at = bits->behind - 64 + (uint64_t)__builtin_ctzll(bits->word), zeros = at - bits->from;
  bits->word &= bits->word - 1;
  bits->from = at + 1;
  return zeros;
}

/* The zigzag numbers of one block, whose remainders of `width` bits begin at `low`. Returns 0 where all of them are. */
static inline uint64_t read_block(struct unary *high, const uint8_t *low, unsigned width, uint64_t *zigzag) {
  const uint64_t mask = (UINT64_C(1) << width) - 1;
  uint64_t wrong = 0, bit = 0;
  for (size_t i = 0; i < BLOCK; ++i, bit += width) {
    const uint64_t quotient = next(high);
    uint64_t remainder = load(low + (bit >> 3)) >> (bit & 7);
    if (width > 56 && (bit & 7)) remainder |= (uint64_t)low[(bit >> 3) + 8] << (64 - (bit & 7));
    wrong |= (quotient >> 1) >> (63 - width);
    zigzag[i] = (quotient << width) | (remainder & mask);
  }
  return wrong;
}

/* counts[n] from data[size], which 16 readable bytes follow: size of the remainders, widths, remainders, unary parts.
 * Returns 0, or TARED_MALFORMED for bytes of another layout, and for counts that are negative or more together than
 * int64 holds. */
FOR_THIS_CPU int32_t tared_unpack(const uint8_t *data, size_t size, int64_t *counts, size_t n) {
  const size_t blocks = (n + BLOCK - 1) / BLOCK;
  uint32_t remainders;
  if (size < sizeof remainders) return TARED_MALFORMED;
  memcpy(&remainders, data, sizeof remainders);
  data += sizeof remainders;
  size -= sizeof remainders;
  if (size < blocks || size - blocks < remainders) return TARED_MALFORMED;
  const uint8_t *low = data + blocks, *low_end = low + remainders;
  struct unary high = {low_end, 8 * (uint64_t)(size - blocks - remainders), 0, 0, 0, 0};
  uint64_t value = 0, sum = 0, zigzag[BLOCK] = {0};
  for (size_t block = 0; block < blocks; ++block) {
    const size_t first = block * BLOCK, here = n - first < BLOCK ? n - first : BLOCK;
    const unsigned width = data[block];
    if (width == SAME) {
      memset(zigzag, 0, sizeof zigzag);
    } else {
      if (width > 63 || (size_t)(low_end - low) < (size_t)8 * width) return TARED_MALFORMED;
      if (read_block(&high, low, width, zigzag)) return TARED_MALFORMED;
      low += (size_t)8 * width;
    }
    uint64_t wrong = 0;
    for (size_t i = 0; i < here; ++i) {
      value += (zigzag[i] >> 1) ^ (0 - (zigzag[i] & 1));
      counts[first + i] = (int64_t)value;
      sum += value;
      wrong |= value | sum; /* one that is 2^63 or more stays seen, though it wraps later */
    }
    for (size_t i = here; i < BLOCK; ++i) wrong |= zigzag[i] ? UINT64_C(1) << 63 : 0;
    if (wrong >> 63) return TARED_MALFORMED;
  }
  /* What nobody has asked for fills up the last byte. */
  return high.ended || low != low_end || high.end - high.from >= 8 || high.word ? TARED_MALFORMED : 0;
}

/* Adds counts[n], n a power of two, to sum[n >> fold]: each 2^fold neighbours to one. None is negative, and int64 holds
 * all of them together. Returns their total, or -1 where it is more than `room`: then nothing is added. */
FOR_THIS_CPU int64_t tared_add(int64_t *restrict sum, const int64_t *restrict counts, size_t n, unsigned fold, int64_t room) {
  int64_t total = 0;
  for (size_t i = 0; i < n; ++i) total += counts[i];
  if (total > room) return -1;
  if (fold == 0)
    for (size_t i = 0; i < n; ++i) sum[i] += counts[i];
  else if (fold == 1)
    for (size_t i = 0; i < n / 2; ++i) sum[i] += counts[2 * i] + counts[2 * i + 1];
  else
    for (size_t i = 0; i < n >> fold; ++i) {
      int64_t together = 0;
      for (const int64_t *each = counts + (i << fold); each < counts + ((i + 1) << fold); ++each) together += *each;
      sum[i] += together;
    }
  return total;
}
