// Attention in bfloat16 tiles (AMX), with float32 sums. With one part per number, queries, keys, weights and values are
// rounded to bfloat16. With three parts none is rounded: the first eight bits of a number, the next and the last are a
// bfloat16 each, and the products of the parts of two numbers add up to theirs exactly. Six of the nine products are
// computed; those left out (second with third, third with second, third with third) are less than 2^-22 of a product,
// 2^-24 of it on average, about its rounding error in float32. Sums round less often than in float32: registers sum 32
// products before adding them to the accumulator.
// Keys are processed in blocks of thirty-two from the first that a token sees, so a token gets the same bits alone and
// with its neighbours, as long as all of them see the same first key.
#pragma once
#include "amx.hpp"
#include "attend_tile.hpp"

#ifdef TILE_REGISTERS
// The number of bfloat16 parts of the operands: OF for queries and weights, KEPT for keys and values, which is one if
// they are cached in bfloat16.
template <int OF, int KEPT>
struct Split {
  static constexpr int KEPT_PARTS = KEPT;
  static constexpr int ROW = OF == 3 ? 48 : 32;  // floats for thirty-two scores, later for all parts of as many weights
};

template <class Element, int OF>
using SplitOf = Split<OF, std::is_same_v<Element, float> ? OF : 1>;

// Permutations of two groups of sixteen numbers: interleaved, from one register; of the upper halves of 32-bit elements
// in two registers, interleaved or in order.
alignas(64) static constexpr uint16_t INTERLEAVE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
alignas(64) static constexpr uint16_t UPPER_INTERLEAVE[32] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                                              17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
alignas(64) static constexpr uint16_t UPPER_HALVES[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

// Splits two times sixteen numbers into PARTS registers of thirty-two bfloat16 numbers each; three parts are in the
// order of `upper`. The second part of a number that is not finite is NaN.
template <int PARTS>
static inline void split32(__m512 low, __m512 high, const uint16_t* upper, __m512i parts[PARTS]) {
  if (PARTS == 1) {
    parts[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    return;
  }
  const __m512i order = _mm512_load_si512(upper);
  const __m512 mask = _mm512_castsi512_ps(_mm512_set1_epi32(UPPER));
  for (int part = 0; part < PARTS; part++) {
    parts[part] = _mm512_permutex2var_epi16(_mm512_castps_si512(low), order, _mm512_castps_si512(high));
    low = _mm512_sub_ps(low, _mm512_and_ps(low, mask));
    high = _mm512_sub_ps(high, _mm512_and_ps(high, mask));
  }
}

template <int PARTS>
static inline void neighbours(const float* at, __m512i parts[PARTS]) {
  split32<PARTS>(_mm512_loadu_ps(at), _mm512_loadu_ps(at + 16), UPPER_HALVES, parts);
}
template <int PARTS>
static inline void neighbours(const uint16_t* at, __m512i parts[PARTS]) { parts[0] = _mm512_loadu_si512(at); }

// Interleaves sixteen numbers and sixteen others, which are zero if `second` is null.
template <int PARTS>
static inline void interleave(const float* first, const float* second, __m512i parts[PARTS]) {
  split32<PARTS>(_mm512_loadu_ps(first), second ? _mm512_loadu_ps(second) : _mm512_setzero_ps(), UPPER_INTERLEAVE, parts);
  if (PARTS == 1) parts[0] = _mm512_permutexvar_epi16(_mm512_load_si512(INTERLEAVE), parts[0]);
}
template <int PARTS>
static inline void interleave(const uint16_t* first, const uint16_t* second, __m512i parts[PARTS]) {
  __m512i low = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  if (second) low = _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1);
  parts[0] = _mm512_permutexvar_epi16(_mm512_load_si512(INTERLEAVE), low);
}

// 2^x for weights that are split into PARTS numbers, by a minimax polynomial for the fraction of x: of degree four,
// with a relative error of 3e-6, for weights that are rounded to bfloat16, otherwise of degree six, with 1.4e-8 before
// rounding. 0 for -inf, and NaN stays NaN.
template <int PARTS>
static inline __m512 two_to_the(__m512 x) {
  const __m512 above = _mm512_reduce_ps(x, 1);
  if (PARTS == 3) {
    __m512 p = _mm512_set1_ps(0.000216129265f);
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.00124678423f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.00967545249f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.0554852821f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.240229309f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.693147063f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
  }
  __m512 p = _mm512_set1_ps(0.0135341676f);
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.0520114612f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.241442757f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(0.693003835f));
  p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(p, x);
}

// The buffers of a task: one tile of sixteen query rows at a time, and either all blocks of keys and values or a single
// block that is overwritten.
struct AmxBuffers {
  uint16_t *queries, *keys, *values;  // tiles [size / 32, OF], blocks of [size / 32, KEPT, 2] and of [size / 16, KEPT]
  float *scores, *out;                // [blocks, 16, ROW], in which weights overwrite scores, and [16, size]
  int size;
};

struct AmxRoom {
  TileMemory queries, keys, values, scores, out;
  std::vector<int> seen;  // the number of keys that each row sees

  template <int OF, int KEPT>
  AmxBuffers with(Split<OF, KEPT> split, int blocks, int kept, int size) {
    size_t each = (size_t)kept * DEPTH * size * KEPT;
    return {queries.of(16 * size * OF), keys.of(each), values.of(each),
            (float*)scores.of((size_t)blocks * 16 * split.ROW * 2), (float*)out.of(16 * size * 2), size};
  }
};

// The cached keys and values of a head: `count` rows with the numbers `numbers`, of `size` elements each.
template <class Element>
struct CachedHead {
  const Element *keys, *values;
  int64_t key_row, value_row;
  const int64_t* numbers;
  int count, size;

  int blocks() const { return (count + DEPTH - 1) / DEPTH; }
  const Element* key(int i) const { return keys + numbers[std::min(i, count - 1)] * key_row; }
  const Element* value(int i) const { return values + numbers[i] * value_row; }

  // `asm volatile`, because compilers (g++ 12) drop a function that only prefetches.
  static void fetch(const Element* row, int elements) {
    asm volatile("");
    for (int d = 0; d < elements; d += 64 / sizeof(Element)) _mm_prefetch((const char*)(row + d), _MM_HINT_T0);
  }
  // Prefetches key i or, past the last key, a value: rows are too far apart for hardware prefetching.
  void expect_key(int i) const { i < count ? fetch(key(i), size) : expect_value(i - count, 0, size); }
  void expect_value(int i, int d, int elements) const {
    if (i < count) fetch(value(i) + d, elements);
  }
};

// Transposes block `b` of keys: tiles [size / 32, PARTS, 2, 16 pairs of elements, 16 keys]. The last key is repeated.
template <int PARTS, class Element>
static inline void transpose_block(const CachedHead<Element>& m, int b, uint16_t* to) {
  for (int d = 0; d < m.size; d += DEPTH, to += PARTS * 2 * TILE)
    for (int half = 0; half < 2; half++) {
      __m512 lanes[PARTS][16];
      for (int i = 0; i < 16; i++) {
        const int row = b * DEPTH + half * 16 + i;
        if (d == 0) m.expect_key(row + DEPTH);
        __m512i parts[PARTS];
        neighbours<PARTS>(m.key(row) + d, parts);
        for (int part = 0; part < PARTS; part++) lanes[part][i] = _mm512_castsi512_ps(parts[part]);
      }
      for (int part = 0; part < PARTS; part++) {
        transpose16(lanes[part]);
        for (int i = 0; i < 16; i++) _mm512_store_ps(to + (2 * part + half) * TILE + i * 32, lanes[part][i]);
      }
    }
}

// Copies block `b` of keys, not transposed: tiles [2, size / 32, PARTS, 16 keys, 32 elements]. The last key is
// repeated.
template <int PARTS, class Element>
static inline void cut_block(const CachedHead<Element>& m, int b, uint16_t* to) {
  for (int i = 0; i < DEPTH; i++) {
    const int row = b * DEPTH + i;
    m.expect_key(row + DEPTH);
    const Element* key = m.key(row);
    uint16_t* at = to + i / 16 * 16 * m.size * PARTS + i % 16 * DEPTH;
    for (int d = 0; d < m.size; d += DEPTH) {
      __m512i parts[PARTS];
      neighbours<PARTS>(key + d, parts);
      for (int part = 0; part < PARTS; part++, at += TILE) _mm512_store_si512(at, parts[part]);
    }
  }
}

// Copies elements from `first` on of block `b` of values: tiles [elements / 16, PARTS, 16 pairs of keys, 16 elements],
// zero past the last value. Returns whether all are finite: a weight of zero does not cancel NaN or infinity.
template <int PARTS, class Element>
static inline bool pair_block(const CachedHead<Element>& m, int b, int first, int elements, uint16_t* to) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 broken = 0;
  for (int d = first; d < first + elements; d += 16, to += PARTS * TILE)
    for (int i = 0; i < 16; i++) {
      const int row = b * DEPTH + 2 * i;
      __m512i two[PARTS] = {};
      if (row < m.count) {
        if (d == first) {
          m.expect_value(row + DEPTH, first, elements);
          m.expect_value(row + 1 + DEPTH, first, elements);
        }
        interleave<PARTS>(m.value(row) + d, row + 1 < m.count ? m.value(row + 1) + d : nullptr, two);
      }
      broken |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(two[0], exponent), exponent);
      for (int part = 0; part < PARTS; part++) _mm512_store_si512(to + part * TILE + i * 32, two[part]);
    }
  return broken == 0;
}

// Writes a query, scaled, as row `row` of the tiles.
template <int OF>
static inline void put_query(const AmxBuffers& r, int row, const float* query, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int d = 0; d < r.size; d += 16)
    put_parts(_mm512_mul_ps(_mm512_loadu_ps(query + d), factor), OF,
              r.queries + d / DEPTH * OF * TILE + row * DEPTH + d % DEPTH);
}

// The scores of the tile of rows with the first `blocks` blocks of keys, two blocks at a time, so that products of four
// tiles are in flight.
template <int OF, int KEPT>
static inline void score_blocks(Split<OF, KEPT>, const AmxBuffers& r, int blocks) {
  constexpr int ROW = Split<OF, KEPT>::ROW;
  const size_t block = (size_t)DEPTH * r.size * KEPT;
  written();
  for (int b = 0; b < blocks; b += 2) {
    // A single last block is computed twice.
    const int other = std::min(b + 1, blocks - 1);
    const uint16_t *one = r.keys + b * block, *two = r.keys + other * block;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t* queries = r.queries;
    for (int d = 0; d < r.size; d += DEPTH, queries += OF * TILE)
      for (int part = 0; part < KEPT; part++, one += 2 * TILE, two += 2 * TILE)
        for (int of = 0; of < OF - part; of++) {
          _tile_loadd(4, queries + of * TILE, 64);
          _tile_loadd(6, one, 64);
          _tile_loadd(7, one + TILE, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(6, two, 64);
          _tile_loadd(7, two + TILE, 64);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
        }
    float *to = r.scores + b * 16 * ROW, *next = r.scores + other * 16 * ROW;
    _tile_stored(0, to, ROW * 4);
    _tile_stored(1, to + 16, ROW * 4);
    _tile_stored(2, next, ROW * 4);
    _tile_stored(3, next + 16, ROW * 4);
  }
}

static inline void transpose_tile(const float* from, float* to, int next) {
  __m512 rows[16];
  for (int i = 0; i < 16; i++) rows[i] = _mm512_load_ps(from + i * 16);
  transpose16(rows);
  for (int i = 0; i < 16; i++) _mm512_store_ps(to + i * next, rows[i]);
}

// The scores of block `b`, with the same bits as `score_blocks`, for transposed queries and keys that are not
// transposed, in the first block of `r`.
template <int OF, int KEPT>
static inline void score_transposed(Split<OF, KEPT>, const AmxBuffers& r, int b) {
  constexpr int ROW = Split<OF, KEPT>::ROW;
  alignas(64) float sums[2][256];
  const size_t half = (size_t)16 * r.size * KEPT;
  const uint16_t *keys = r.keys, *queries = r.queries;
  written();
  _tile_zero(0);
  _tile_zero(1);
  for (int d = 0; d < r.size; d += DEPTH, queries += OF * TILE)
    for (int part = 0; part < KEPT; part++, keys += TILE)
      for (int of = 0; of < OF - part; of++) {
        _tile_loadd(4, queries + of * TILE, 64);
        _tile_loadd(6, keys, 64);
        _tile_loadd(7, keys + half, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 7, 4);
      }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  for (int h = 0; h < 2; h++) transpose_tile(sums[h], r.scores + b * 16 * ROW + h * 16, ROW);
}

// Masks for the first `count` of thirty-two scores.
struct LaneMasks {
  __mmask16 low, high;
  explicit LaneMasks(int count)
      : low(count >= 16 ? 0xffff : (1u << count) - 1), high(count >= 32 ? 0xffff : count > 16 ? (1u << (count - 16)) - 1 : 0) {}
};

template <int ROW>
static inline __m512 highest(const float* scores, int seen) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 low = lowest, high = lowest;
  int b = 0;
  for (; (b + 1) * DEPTH <= seen; b++) {
    low = _mm512_max_ps(_mm512_load_ps(scores + b * 16 * ROW), low);
    high = _mm512_max_ps(_mm512_load_ps(scores + b * 16 * ROW + 16), high);
  }
  if (b * DEPTH < seen) {
    LaneMasks mask(seen - b * DEPTH);
    low = _mm512_mask_max_ps(low, mask.low, _mm512_load_ps(scores + b * 16 * ROW), low);
    high = _mm512_mask_max_ps(high, mask.high, _mm512_load_ps(scores + b * 16 * ROW + 16), high);
  }
  return _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_max_ps(low, high)));
}

// Splits thirty-two weights into their parts and stores them, 64 bytes per part.
template <int OF>
static inline void put_weights(float* at, __m512 low, __m512 high) {
  __m512i parts[OF];
  split32<OF>(low, high, UPPER_HALVES, parts);
  for (int part = 0; part < OF; part++) _mm512_store_si512(at + part * 16, parts[part]);
}

// Turns a row of scores into weights in place, zero for keys that the row does not see, and returns their sum.
template <int OF, int KEPT>
static inline float weigh_row(Split<OF, KEPT>, float* scores, int blocks, int seen) {
  constexpr int BLOCK = 16 * Split<OF, KEPT>::ROW;
  const __m512 top = highest<Split<OF, KEPT>::ROW>(scores, seen), none = _mm512_setzero_ps();
  __m512 low_total = none, high_total = none;
  int b = 0;
  for (; (b + 1) * DEPTH <= seen; b++, scores += BLOCK) {
    __m512 low = two_to_the<OF>(_mm512_sub_ps(_mm512_load_ps(scores), top));
    __m512 high = two_to_the<OF>(_mm512_sub_ps(_mm512_load_ps(scores + 16), top));
    low_total = _mm512_add_ps(low_total, low);
    high_total = _mm512_add_ps(high_total, high);
    put_weights<OF>(scores, low, high);
  }
  if (b < blocks) {
    LaneMasks mask(seen - b++ * DEPTH);
    __m512 low = _mm512_maskz_mov_ps(mask.low, two_to_the<OF>(_mm512_sub_ps(_mm512_load_ps(scores), top)));
    __m512 high = _mm512_maskz_mov_ps(mask.high, two_to_the<OF>(_mm512_sub_ps(_mm512_load_ps(scores + 16), top)));
    low_total = _mm512_add_ps(low_total, low);
    high_total = _mm512_add_ps(high_total, high);
    put_weights<OF>(scores, low, high);
  }
  for (; b < blocks; b++) put_weights<OF>(scores += BLOCK, none, none);
  return _mm512_reduce_add_ps(_mm512_add_ps(low_total, high_total));
}

// The outputs of the tile of rows over the first `blocks` blocks of values, from element `d` on: PANELS (four or two)
// panels of sixteen elements. `block(b, d, elements)` returns the address of these elements of a block.
template <int PANELS, int OF, int KEPT, class Block>
static inline void mix_panels(Split<OF, KEPT>, const AmxBuffers& r, int blocks, int d, Block block) {
  constexpr int ROW = Split<OF, KEPT>::ROW, NEXT = KEPT * TILE;
  const float* weights = r.scores;
  _tile_zero(0);
  _tile_zero(1);
  if (PANELS == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int b = 0; b < blocks; b++, weights += 16 * ROW) {
    const uint16_t* values = block(b, d, PANELS * 16);
    written();
    for (int part = 0; part < KEPT; part++)
      for (int of = 0; of < OF - part; of++) {
        _tile_loadd(4, weights + of * 16, ROW * 4);
        _tile_loadd(6, values + part * TILE, 64);
        _tile_loadd(7, values + part * TILE + NEXT, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (PANELS == 4) {
          _tile_loadd(6, values + part * TILE + 2 * NEXT, 64);
          _tile_loadd(7, values + part * TILE + 3 * NEXT, 64);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
        }
      }
  }
  _tile_stored(0, r.out + d, r.size * 4);
  _tile_stored(1, r.out + d + 16, r.size * 4);
  if (PANELS == 4) {
    _tile_stored(2, r.out + d + 32, r.size * 4);
    _tile_stored(3, r.out + d + 48, r.size * 4);
  }
}

template <class Parts, class Block>
static inline void mix_blocks(Parts parts, const AmxBuffers& r, int blocks, Block block) {
  int d = 0;
  for (; d + 64 <= r.size; d += 64) mix_panels<4>(parts, r, blocks, d, block);
  for (; d < r.size; d += 32) mix_panels<2>(parts, r, blocks, d, block);
}

// Copies all blocks, with keys transposed; returns whether all values are finite.
template <int KEPT, class Element>
static bool copy_blocks(const AmxBuffers& r, const CachedHead<Element>& m) {
  bool numbers_only = true;
  for (int b = 0; b < m.blocks(); b++) {
    const size_t at = (size_t)b * DEPTH * r.size * KEPT;
    transpose_block<KEPT>(m, b, r.keys + at);
    numbers_only &= pair_block<KEPT>(m, b, 0, r.size, r.values + at);
  }
  return numbers_only;
}

// Attends query rows to the blocks in `r`: row i is at `from(i)` and sees `seen[i]` keys, never fewer than the row
// before it. `put(i, out, share)` receives the output of row i, which is to be multiplied by `share`.
template <int OF, int KEPT, class From, class Put>
static void attend_tiled(Split<OF, KEPT> split, const AmxBuffers& r, From from, const int* seen, int rows, float scale, Put put) {
  float totals[16];
  auto block = [&](int b, int d, int) { return r.values + ((size_t)b * r.size + d) * DEPTH * KEPT; };
  for (int first = 0; first < rows; first += 16) {
    int here = std::min(16, rows - first), blocks = (seen[first + here - 1] + DEPTH - 1) / DEPTH;
    for (int i = 0; i < here; i++) put_query<OF>(r, i, from(first + i), scale * 1.44269504f);
    score_blocks(split, r, blocks);
    for (int i = 0; i < here; i++) totals[i] = weigh_row(split, r.scores + i * split.ROW, blocks, seen[first + i]);
    mix_blocks(split, r, blocks, block);
    for (int i = 0; i < here; i++) put(first + i, r.out + (size_t)i * r.size, 1.0f / totals[i]);
  }
}

// Like `attend_tiled`, for the rows of one token, which sees all keys: `r` has room for one block of keys and one of
// values, which stay in the L1 cache.
template <int OF, int KEPT, class Element, class From, class Put>
static void attend_alone(Split<OF, KEPT> split, const AmxBuffers& r, const CachedHead<Element>& m, From from, int rows, float scale,
                         Put put) {
  float totals[16];
  auto block = [&](int b, int d, int elements) {
    pair_block<KEPT>(m, b, d, elements, r.values);
    return r.values;
  };
  for (int i = 0; i < DEPTH; i++) m.expect_key(i);
  for (int first = 0; first < rows; first += 16) {
    const int here = std::min(16, rows - first);
    for (int i = 0; i < here; i++) put_query<OF>(r, i, from(first + i), scale * 1.44269504f);
    for (int t = 0; t < r.size / DEPTH * OF; t++) transpose_tile((float*)r.queries + t * 256, (float*)r.queries + t * 256, 16);
    for (int b = 0; b < m.blocks(); b++) {
      cut_block<KEPT>(m, b, r.keys);
      score_transposed(split, r, b);
    }
    for (int i = 0; i < here; i++) totals[i] = weigh_row(split, r.scores + i * split.ROW, m.blocks(), m.count);
    mix_blocks(split, r, m.blocks(), block);
    for (int i = 0; i < here; i++) put(first + i, r.out + (size_t)i * r.size, 1.0f / totals[i]);
  }
}
#endif
