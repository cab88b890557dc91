// Attention in tiles of bfloat16 (AMX): queries, keys, weights and values are rounded to bfloat16, sums are float32.
// Keys are taken in blocks of thirty-two from the first that a token sees, so that a token gets the same bits alone and
// among its neighbours, as long as all of them see the same first key.
#pragma once
#include "amx.hpp"
#include "attend_tile.hpp"

#ifdef TILE_REGISTERS
static inline __m512i rounded32(const float* at) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + 16), _mm512_loadu_ps(at));
}
static inline __m512i rounded32(const uint16_t* at) { return _mm512_loadu_si512(at); }

static inline __m512i rounded_two(const float* first, const float* second) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(second), _mm512_loadu_ps(first));
}
static inline __m512i rounded_two(const uint16_t* first, const uint16_t* second) {
  __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1);
}

// 2^x to 3e-6 of it, for what is rounded to bfloat16 next: a polynomial of degree four for what x is above a whole number,
// fitted to be off nowhere by more. 0 for -inf, NaN stays NaN.
static inline __m512 two_to_the(__m512 x) {
  const __m512 above = _mm512_reduce_ps(x, 1);
  __m512 p = _mm512_set1_ps(0.0135341676f);
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.0520114612f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.241442757f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.693003835f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(p, x);
}

// What one task works on: tiles of sixteen rows of queries in turn, all with the same blocks of keys and values.
struct Roomed {
  uint16_t *queries, *keys, *values;  // [size / 32] tiles, blocks of [size / 32, 2] and of [size / 16]
  float *scores, *out;                // [blocks, 16, 32], in which weights take the place of scores, and [16, size]
  int size;
};

struct AmxRoom {
  TileMemory queries, keys, values, scores, out;
  std::vector<int> seen;  // keys that each row sees

  Roomed with(int blocks, int size) {
    size_t each = (size_t)blocks * DEPTH * size;
    return {queries.of(16 * size), keys.of(each), values.of(each), (float*)scores.of((size_t)blocks * TILE * 2),
            (float*)out.of(16 * size * 2), size};
  }
};

// Thirty-two keys, turned: tiles [size / 32, 2, 16 pairs of elements, 16 keys]. Past the last of `here` it is repeated.
template <class Element>
static inline void turn_block(const Element* keys, int64_t row, const int64_t* numbers, int here, int size, uint16_t* to) {
  for (int d = 0; d < size; d += DEPTH)
    for (int half = 0; half < 2; half++, to += TILE) {
      __m512 lanes[16];
      for (int i = 0; i < 16; i++)
        lanes[i] = _mm512_castsi512_ps(rounded32(keys + numbers[std::min(half * 16 + i, here - 1)] * row + d));
      turn16(lanes);
      for (int i = 0; i < 16; i++) _mm512_store_ps(to + i * 32, lanes[i]);
    }
}

// Thirty-two values as tiles [size / 16, 16 pairs of keys, 16 elements]; those past the last of `here` are zero. Whether
// all are numbers: weights of zero do not hide others.
template <class Element>
static inline bool pair_block(const Element* values, int64_t row, const int64_t* numbers, int here, int size, uint16_t* to) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i interleave = _mm512_load_si512(order), exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 broken = 0;
  for (int d = 0; d < size; d += 16)
    for (int i = 0; i < 16; i++, to += 32) {
      int first = 2 * i, second = first + 1;
      __m512i two = _mm512_setzero_si512();
      if (first < here) {
        const Element* one = values + numbers[first] * row + d;
        two = rounded_two(one, second < here ? values + numbers[second] * row + d : one);
        if (second >= here) two = _mm512_zextsi256_si512(_mm512_castsi512_si256(two));
      }
      broken |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(two, exponent), exponent);
      _mm512_store_si512(to, _mm512_permutexvar_epi16(interleave, two));
    }
  return broken == 0;
}

// A row of queries, scaled, as row `row` of the tiles.
static inline void put_query(const Roomed& r, int row, const float* query, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int d = 0; d < r.size; d += 16)
    store16(r.queries + d / DEPTH * TILE + row * DEPTH + d % DEPTH, _mm512_mul_ps(_mm512_loadu_ps(query + d), factor));
}

// Scores of the tile of rows with the first `blocks` blocks of keys, two blocks at a time: products of four tiles are under
// way then.
static inline void score_blocks(const Roomed& r, int blocks) {
  const size_t block = (size_t)DEPTH * r.size;
  written();
  for (int b = 0; b < blocks; b += 2) {
    // A last block by itself is its own neighbour.
    const int other = std::min(b + 1, blocks - 1);
    const uint16_t *one = r.keys + b * block, *two = r.keys + other * block;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t d = 0; d < block; d += 2 * TILE) {
      _tile_loadd(4, r.queries + d / 2, 64);
      _tile_loadd(6, one + d, 64);
      _tile_loadd(7, one + d + TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, two + d, 64);
      _tile_loadd(7, two + d + TILE, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
    float *to = r.scores + b * TILE, *next = r.scores + other * TILE;
    _tile_stored(0, to, 2 * 64);
    _tile_stored(1, to + 16, 2 * 64);
    _tile_stored(2, next, 2 * 64);
    _tile_stored(3, next + 16, 2 * 64);
  }
}

// The first `count` of thirty-two scores; the others weigh nothing.
struct Few {
  __mmask16 low, high;
  explicit Few(int count)
      : low(count >= 16 ? 0xffff : (1u << count) - 1), high(count >= 32 ? 0xffff : count > 16 ? (1u << (count - 16)) - 1 : 0) {}
};

static inline __m512 highest(const float* scores, int seen) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 low = lowest, high = lowest;
  int b = 0;
  for (; (b + 1) * DEPTH <= seen; b++) {
    low = _mm512_max_ps(_mm512_load_ps(scores + b * TILE), low);
    high = _mm512_max_ps(_mm512_load_ps(scores + b * TILE + 16), high);
  }
  if (b * DEPTH < seen) {
    Few few(seen - b * DEPTH);
    low = _mm512_mask_max_ps(low, few.low, _mm512_load_ps(scores + b * TILE), low);
    high = _mm512_mask_max_ps(high, few.high, _mm512_load_ps(scores + b * TILE + 16), high);
  }
  return _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(low, high)));
}

// A row of scores becomes weights in bfloat16 where they lay, in the first half of each 128 bytes; keys that it does not
// see weigh zero. What the weights sum up to.
static inline float weigh_row(float* scores, int blocks, int seen) {
  const __m512 top = highest(scores, seen);
  __m512 low_total = _mm512_setzero_ps(), high_total = low_total;
  int b = 0;
  for (; (b + 1) * DEPTH <= seen; b++, scores += TILE) {
    __m512 low = two_to_the(_mm512_sub_ps(_mm512_load_ps(scores), top));
    __m512 high = two_to_the(_mm512_sub_ps(_mm512_load_ps(scores + 16), top));
    low_total = _mm512_add_ps(low_total, low);
    high_total = _mm512_add_ps(high_total, high);
    _mm512_store_si512(scores, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  if (b < blocks) {
    Few few(seen - b++ * DEPTH);
    __m512 low = _mm512_maskz_mov_ps(few.low, two_to_the(_mm512_sub_ps(_mm512_load_ps(scores), top)));
    __m512 high = _mm512_maskz_mov_ps(few.high, two_to_the(_mm512_sub_ps(_mm512_load_ps(scores + 16), top)));
    low_total = _mm512_add_ps(low_total, low);
    high_total = _mm512_add_ps(high_total, high);
    _mm512_store_si512(scores, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  for (; b < blocks; b++) _mm512_store_si512(scores += TILE, _mm512_setzero_si512());
  return _mm512_reduce_add_ps(_mm512_add_ps(low_total, high_total));
}

// Outputs of the tile of rows over the first `blocks` blocks of keys, from element `d`: four panels of elements, or two.
template <int PANELS>
static inline void mix_panels(const Roomed& r, int blocks, int d) {
  const uint16_t* values = r.values + (size_t)d * DEPTH;
  written();
  _tile_zero(0);
  _tile_zero(1);
  if (PANELS == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int b = 0; b < blocks; b++, values += DEPTH * r.size) {
    _tile_loadd(4, r.scores + b * TILE, 2 * 64);
    _tile_loadd(6, values, 64);
    _tile_loadd(7, values + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (PANELS == 4) {
      _tile_loadd(6, values + 2 * TILE, 64);
      _tile_loadd(7, values + 3 * TILE, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, r.out + d, r.size * 4);
  _tile_stored(1, r.out + d + 16, r.size * 4);
  if (PANELS == 4) {
    _tile_stored(2, r.out + d + 32, r.size * 4);
    _tile_stored(3, r.out + d + 48, r.size * 4);
  }
}

static inline void mix_blocks(const Roomed& r, int blocks) {
  int d = 0;
  for (; d + 64 <= r.size; d += 64) mix_panels<4>(r, blocks, d);
  for (; d < r.size; d += 32) mix_panels<2>(r, blocks, d);
}

// Blocks of the keys and values `numbers[0]` to `numbers[count - 1]`; whether all values are numbers.
template <class Element>
static bool take_blocks(const Roomed& r, const Element* keys, int64_t key_row, const Element* values, int64_t value_row,
                        const int64_t* numbers, int count) {
  bool numbers_only = true;
  for (int first = 0; first < count; first += DEPTH) {
    int here = std::min(DEPTH, count - first);
    turn_block(keys, key_row, numbers + first, here, r.size, r.keys + (size_t)first * r.size);
    numbers_only &= pair_block(values, value_row, numbers + first, here, r.size, r.values + (size_t)first * r.size);
  }
  return numbers_only;
}

// Rows of queries, of which row i lies at `from(i)` and sees `seen[i]` keys, never fewer than the row before it, with the
// blocks in `r`; `put(i, out, share)` takes what row i gets, to be multiplied by `share`.
template <class From, class Put>
static void attend_tiled(const Roomed& r, From from, const int* seen, int rows, float scale, Put put) {
  float totals[16];
  for (int first = 0; first < rows; first += 16) {
    int here = std::min(16, rows - first), blocks = (seen[first + here - 1] + DEPTH - 1) / DEPTH;
    for (int i = 0; i < here; i++) put_query(r, i, from(first + i), scale * 1.44269504f);
    score_blocks(r, blocks);
    for (int i = 0; i < here; i++) totals[i] = weigh_row(r.scores + i * DEPTH, blocks, seen[first + i]);
    mix_blocks(r, blocks);
    for (int i = 0; i < here; i++) put(first + i, r.out + (size_t)i * r.size, 1.0f / totals[i]);
  }
}
#endif
