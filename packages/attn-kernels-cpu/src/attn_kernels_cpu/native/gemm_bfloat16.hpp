// Products of two float32 matrices whose elements are rounded to bfloat16 while they are packed; sums are float32. On
// CPUs with bfloat16 instructions, two neighbours in depth are multiplied at a time.
#pragma once
#include "gemm.hpp"

static inline Floats load_first(const float* at, int count) { return count > 0 ? load_lanes(at, count) : all(0.0f); }

#if defined(__AVX512VNNI__)
// The AVX-512 library is compiled without these instructions, because not all CPUs with AVX-512 have them.
#define WITH_BFLOAT16 __attribute__((target("avx512bf16")))

// Sixteen bfloat16 pairs of two rows of sixteen, the numbers of the first row in the lower halves.
WITH_BFLOAT16 static inline Floats pairs_of_rows(Floats first, Floats second) {
  const __m512i number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_or_si512(number, _mm512_slli_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(16)), 16));
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
}

// Sixteen bfloat16 pairs of the first `count` of thirty-two neighbours, padded with zeros.
WITH_BFLOAT16 static inline Floats pairs_of_row(const float* at, int count) {
  return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(load_first(at + 16, count - 16), load_first(at, count)));
}

// The sizes of packing buffers, in pairs: a pair is as large as a float.
constexpr int PAIRS_DEPTH = 192, PAIRS_COLUMNS = 512;

// Packs the columns of b into panels of pairs [(depth + 1) / 2, 16]; columns past the last are zero.
WITH_BFLOAT16 static void pack_column_pairs(Matrix b, int depth, int columns, float* to) {
  const int pairs = (depth + 1) / 2;
  for (int n = 0; n < columns; n += 16, to += (int64_t)pairs * 16) {
    const int here = std::min(16, columns - n);
    const float* from = b.at + n * b.column;
    if (b.column == 1) {
      for (int k = 0; k < depth; k += 2) {
        Floats second = k + 1 < depth ? load_lanes(from + (k + 1) * b.row, here) : all(0.0f);
        store16(to + k * 8, pairs_of_rows(load_lanes(from + k * b.row, here), second));
      }
      continue;
    }
    for (int k = 0; k < pairs; k += 16) {
      Floats lanes[16];
      for (int i = 0; i < 16; i++)
        lanes[i] = i < here ? pairs_of_row(from + i * b.column + 2 * k, depth - 2 * k) : all(0.0f);
      transpose16(lanes);
      for (int i = 0; i < std::min(16, pairs - k); i++) store16(to + (k + i) * 16, lanes[i]);
    }
  }
}

// Multiplies ROWS rows by PANELS panels. Pair k of row r is at[r * row + k * step].
template <int ROWS, int PANELS>
WITH_BFLOAT16 static void pairs_tile(const float* at, int64_t row, int64_t step, const float* b, int pairs, int columns,
                                     Product to) {
  Floats sum[ROWS][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
      sum[r][p] = to.add ? load_lanes(to.at + r * to.stride + p * 16, columns - p * 16) : all(0.0f);
  for (int k = 0; k < pairs; k++) {
    __m512bh w[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) w[p] = (__m512bh)_mm512_loadu_si512(b + ((int64_t)p * pairs + k) * 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, at + r * row + k * step, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], x, w[p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
      Floats value = sum[r][p];
      if (to.bias) value = value + load_lanes(to.bias + p * 16, columns - p * 16);
      store_some(to.at + r * to.stride + p * 16, columns - p * 16, value);
    }
}

// Multiplies the next ROWS rows by all panels; `room` is a buffer for their pairs.
template <int ROWS>
WITH_BFLOAT16 static void pairs_rows(Matrix a, const float* b, int depth, int columns, Product to, float* room) {
  constexpr int PANELS = Shape::PANELS;
  const int pairs = (depth + 1) / 2;
  const bool transposed = a.column != 1;
  if (transposed) {
    for (int k = 0; k < depth; k += 2) {
      Floats second = k + 1 < depth ? load_lanes(a.at + (k + 1) * a.column, ROWS) : all(0.0f);
      store16(room + k * 8, pairs_of_rows(load_lanes(a.at + k * a.column, ROWS), second));
    }
  } else {
    for (int r = 0; r < ROWS; r++)
      for (int k = 0; k < pairs; k += 16)
        store16(room + r * PAIRS_DEPTH + k, pairs_of_row(a.at + r * a.row + 2 * k, depth - 2 * k));
  }
  const int64_t row = transposed ? 1 : PAIRS_DEPTH, step = transposed ? 16 : 1;
  for (int n = 0; n < columns;) {
    const Product here = {to.at + n, to.stride, to.bias ? to.bias + n : nullptr, to.add};
    const float* panel = b + (int64_t)n * pairs;
    if (columns - n > (PANELS - 1) * 16) {
      pairs_tile<ROWS, PANELS>(room, row, step, panel, pairs, columns - n, here);
      n += PANELS * 16;
    } else {
      pairs_tile<ROWS, 1>(room, row, step, panel, pairs, columns - n, here);
      n += 16;
    }
  }
}

// Like `gemm`, with elements rounded to bfloat16.
WITH_BFLOAT16 static void gemm_pairs(Matrix a, Matrix b, int rows, int columns, int depth, Product to) {
  constexpr int MANY = Shape::FLOAT_ROWS, DEEP = 2 * PAIRS_DEPTH;
  static thread_local std::vector<float> kept;
  kept.resize(PAIRS_DEPTH * (PAIRS_COLUMNS + 16));
  float *packed = kept.data(), *room = packed + PAIRS_DEPTH * PAIRS_COLUMNS;
  for (int n = 0; n < columns; n += PAIRS_COLUMNS)
    for (int m = 0; m < rows; m += GEMM_ROWS)
      // One iteration even for depth 0, whose product is zero.
      for (int k = 0; k == 0 || k < depth; k += DEEP) {
        const int wide = std::min(PAIRS_COLUMNS, columns - n), deep = std::min(DEEP, depth - k);
        const int last = std::min(m + GEMM_ROWS, rows);
        const float* bias = to.bias && k + deep == depth ? to.bias + n : nullptr;
        pack_column_pairs(b.from(k, n), deep, wide, packed);
        for (int i = m; i < last;) {
          const Product there = {to.at + i * to.stride + n, to.stride, bias, to.add || k > 0};
          const Matrix here = a.from(i, k);
          const int left = last - i;
          if (left >= MANY) {
            pairs_rows<MANY>(here, packed, deep, wide, there, room);
            i += MANY;
          } else if (left >= 4) {
            pairs_rows<4>(here, packed, deep, wide, there, room);
            i += 4;
          } else {
            pairs_rows<1>(here, packed, deep, wide, there, room);
            i++;
          }
        }
      }
}

static inline bool multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
#else
static inline bool multiplies_bfloat16() { return false; }
static void gemm_pairs(Matrix, Matrix, int, int, int, Product) {}
#endif

// A copy of a matrix with every element rounded to bfloat16, in `room`, with contiguous lines.
static Matrix rounded_matrix(Matrix from, int rows, int columns, std::vector<float>& room, int threads) {
  const bool by_rows = from.column == 1;
  const int lines = by_rows ? rows : columns, length = by_rows ? columns : rows;
  const int64_t apart = by_rows ? from.row : from.column;
  room.resize((size_t)lines * length + 16);
  float* to = room.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int line = 0; line < lines; line++)
    for (int i = 0; i < length; i += 16) {
      const int here = std::min(16, length - i);
      uint16_t halves[16];
      store16(halves, load_lanes(from.at + line * apart + i, here));
      store_some(to + (int64_t)line * length + i, here, load16(halves));
    }
  return by_rows ? Matrix{to, length, 1} : Matrix{to, 1, length};
}

static void rounded_product(Matrix a, Matrix b, int rows, int columns, int depth, Product to, int threads) {
  if (multiplies_bfloat16()) return product_shared(a, b, rows, columns, depth, to, threads, gemm_pairs);
  static thread_local std::vector<float> left, right;
  const Matrix one = rounded_matrix(a, rows, depth, left, threads), other = rounded_matrix(b, depth, columns, right, threads);
  gemm_shared(one, other, rows, columns, depth, to, threads);
}
