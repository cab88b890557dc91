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

// What one task works on: `rows` rows of queries, in `tiles` tiles, and `blocks` blocks of keys.
struct Roomed {
  uint16_t *queries, *keys, *weights, *values;
  float *scores, *out;
  int rows, tiles, blocks, size, stride;
};

struct AmxRoom {
  TileMemory queries, keys, weights, values, scores, out;
  std::vector<int> seen;  // keys that each row sees

  Roomed with(int rows, int count, int size) {
    int tiles = (rows + 15) / 16, blocks = (count + DEPTH - 1) / DEPTH, stride = blocks * DEPTH;
    return {queries.of((size_t)tiles * 16 * size),
            keys.of((size_t)stride * size),
            weights.of((size_t)tiles * 16 * stride),
            values.of((size_t)stride * size),
            (float*)scores.of((size_t)tiles * 16 * stride * 2),
            (float*)out.of((size_t)tiles * 16 * size * 2),
            rows, tiles, blocks, size, stride};
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

// Scores of one tile of rows with one block of keys.
static inline void score_block(const Roomed& r, int tile, int block) {
  const uint16_t *queries = r.queries + (size_t)tile * 16 * r.size, *keys = r.keys + (size_t)block * DEPTH * r.size;
  written();
  _tile_zero(0);
  _tile_zero(1);
  for (int d = 0; d < r.size / DEPTH; d++) {
    _tile_loadd(4, queries + d * TILE, 64);
    _tile_loadd(6, keys + 2 * d * TILE, 64);
    _tile_loadd(7, keys + (2 * d + 1) * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  float* to = r.scores + (size_t)tile * 16 * r.stride + block * DEPTH;
  _tile_stored(0, to, r.stride * 4);
  _tile_stored(1, to + 16, r.stride * 4);
}

// A row of scores becomes weights in bfloat16, in tiles [blocks, 16 rows, 32 keys]; keys that it does not see weigh zero.
static inline void weigh_row(const Roomed& r, int row, int seen, float scale) {
  float* scores = r.scores + (size_t)row * r.stride;
  uint16_t* to = r.weights + (size_t)(row / 16) * 16 * r.stride + row % 16 * DEPTH;
  const __m512 factor = _mm512_set1_ps(scale);
  int whole = (seen + 15) / 16 * 16;
  for (int j = 0; j < whole; j += 16) _mm512_store_ps(scores + j, _mm512_mul_ps(_mm512_load_ps(scores + j), factor));
  softmax_row(scores, seen);
  for (int j = whole; j < r.stride; j += 16) _mm512_store_ps(scores + j, _mm512_setzero_ps());
  for (int b = 0; b < r.blocks; b++) _mm512_store_si512(to + b * TILE, rounded32(scores + b * DEPTH));
}

// Outputs of one tile of rows over the first `blocks` blocks of keys, two panels of elements at a time.
static inline void mix_blocks(const Roomed& r, int tile, int blocks) {
  const uint16_t* weights = r.weights + (size_t)tile * 16 * r.stride;
  float* to = r.out + (size_t)tile * 16 * r.size;
  written();
  for (int d = 0; d < r.size; d += 32) {
    const uint16_t* values = r.values + (size_t)d * DEPTH;
    _tile_zero(0);
    _tile_zero(1);
    for (int b = 0; b < blocks; b++) {
      _tile_loadd(4, weights + b * TILE, 64);
      _tile_loadd(6, values + (size_t)b * DEPTH * r.size, 64);
      _tile_loadd(7, values + (size_t)b * DEPTH * r.size + TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, to + d, r.size * 4);
    _tile_stored(1, to + d + 16, r.size * 4);
  }
}

// Rows of queries one below another, as tiles [size / 32, 16 rows, 32 elements]; `from(row)` is where a row begins.
template <class From>
static inline void tile_queries(const Roomed& r, From from) {
  if (r.rows % 16) std::memset(r.queries + (size_t)(r.tiles - 1) * 16 * r.size, 0, (size_t)32 * r.size);
  for (int row = 0; row < r.rows; row++) {
    uint16_t* to = r.queries + (size_t)(row / 16) * 16 * r.size + row % 16 * DEPTH;
    for (int d = 0; d < r.size; d += DEPTH) _mm512_store_si512(to + d * 16, rounded32(from(row) + d));
  }
}

// The rows in `r`, of which row i sees `seen[i]` keys, never fewer than the row before it; false, with nothing done, where
// values that some rows do not see are no numbers.
template <class Element>
static bool attend_tiled(const Roomed& r, const Element* keys, int64_t key_row, const Element* values, int64_t value_row,
                         const int64_t* numbers, const int* seen, float scale) {
  auto last = [&](int tile) { return seen[std::min(tile * 16 + 15, r.rows - 1)]; };
  int count = seen[r.rows - 1];
  bool numbers_only = true;
  for (int b = 0; b < r.blocks; b++) {
    int first = b * DEPTH, here = std::min(DEPTH, count - first);
    turn_block(keys, key_row, numbers + first, here, r.size, r.keys + (size_t)first * r.size);
    numbers_only &= pair_block(values, value_row, numbers + first, here, r.size, r.values + (size_t)first * r.size);
  }
  if (!numbers_only && seen[0] < count) return false;
  for (int tile = 0; tile < r.tiles; tile++)
    for (int b = 0; b * DEPTH < last(tile); b++) score_block(r, tile, b);
  for (int row = 0; row < r.rows; row++) weigh_row(r, row, seen[row], scale);
  for (int tile = 0; tile < r.tiles; tile++) mix_blocks(r, tile, (last(tile) + DEPTH - 1) / DEPTH);
  return true;
}
#endif
