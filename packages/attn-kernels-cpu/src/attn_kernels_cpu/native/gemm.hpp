// Products of two float32 matrices for training: neither is packed beforehand, and either may be transposed. Every
// element is one chain of fused multiply-adds in the order of depth, whatever the blocks and the threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "simd.hpp"

// A matrix: element (i, j) is at[i * row + j * column]; one of the two strides is 1.
struct Matrix {
  const float* at;
  int64_t row, column;

  Matrix from(int64_t i, int64_t j) const { return {at + i * row + j * column, row, column}; }
};

// The destination of a product: rows with a stride of `stride` elements. With `add` the product is added to the
// elements; `bias` (or null) has one element per column.
struct Product {
  float* at;
  int64_t stride;
  const float* bias;
  bool add;
};

constexpr int GEMM_DEPTH = 384, GEMM_COLUMNS = 256, GEMM_ROWS = 40 * Shape::FLOAT_ROWS;

static inline Floats load_lanes(const float* at, int count) {
  return count >= 16 ? load16(at) : load_some(at, count, all(0.0f));
}

// Transposes `count` (at most sixteen) rows of `depth` elements, `step` apart, into [depth, 16], padded with zeros.
static void transpose_rows(const float* from, int64_t step, int count, int depth, float* to) {
  int k = 0;
  for (; k + 16 <= depth; k += 16) {
    Floats lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = i < count ? load16(from + i * step + k) : all(0.0f);
    transpose16(lanes);
    for (int i = 0; i < 16; i++) store16(to + (k + i) * 16, lanes[i]);
  }
  for (; k < depth; k++)
    for (int i = 0; i < 16; i++) to[k * 16 + i] = i < count ? from[i * step + k] : 0.0f;
}

// Packs the columns of b into panels [depth, 16]; columns past the last are zero.
static void pack_columns(Matrix b, int depth, int columns, float* to) {
  for (int n = 0; n < columns; n += 16, to += (int64_t)depth * 16) {
    const int here = std::min(16, columns - n);
    const float* from = b.at + n * b.column;
    if (b.column == 1) {
      for (int k = 0; k < depth; k++) store16(to + k * 16, load_lanes(from + k * b.row, here));
    } else {
      transpose_rows(from, b.column, here, depth, to);
    }
  }
}

// Multiplies ROWS rows by PANELS panels. Element (r, k) of the rows is at[r * row + k], or at[k * 16 + r] if TRANSPOSED.
template <int ROWS, int PANELS, bool TRANSPOSED>
static void gemm_tile(const float* at, int64_t row, const float* b, int depth, int columns, Product to) {
  Floats sum[ROWS][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
      sum[r][p] = to.add ? load_lanes(to.at + r * to.stride + p * 16, columns - p * 16) : all(0.0f);
  for (int k = 0; k < depth; k++) {
    Floats w[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) w[p] = load16(b + ((int64_t)p * depth + k) * 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Floats x = all(TRANSPOSED ? at[k * 16 + r] : at[r * row + k]);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(x, w[p], sum[r][p]);
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

template <int ROWS, bool TRANSPOSED>
static void gemm_panels(const float* at, int64_t row, const float* b, int depth, int columns, Product to) {
  constexpr int PANELS = Shape::PANELS;
  for (int n = 0; n < columns;) {
    const Product here = {to.at + n, to.stride, to.bias ? to.bias + n : nullptr, to.add};
    const float* panel = b + (int64_t)n * depth;
    if (columns - n > (PANELS - 1) * 16) {
      gemm_tile<ROWS, PANELS, TRANSPOSED>(at, row, panel, depth, columns - n, here);
      n += PANELS * 16;
    } else {
      gemm_tile<ROWS, 1, TRANSPOSED>(at, row, panel, depth, columns - n, here);
      n += 16;
    }
  }
}

template <int ROWS>
static void gemm_rows(Matrix a, int rows, const float* b, int depth, int columns, Product to, float* transposed) {
  if (a.column == 1) return gemm_panels<ROWS, false>(a.at, a.row, b, depth, columns, to);
  for (int k = 0; k < depth; k++) store16(transposed + k * 16, load_lanes(a.at + k * a.column, rows));
  gemm_panels<ROWS, true>(transposed, 0, b, depth, columns, to);
}

// The packing buffer of the calling thread.
static float* gemm_room() {
  static thread_local std::vector<float> room;
  room.resize(GEMM_DEPTH * (GEMM_COLUMNS + 16));
  return room.data();
}

// to [rows, columns] (+)= a [rows, depth] b [depth, columns] + bias, on the calling thread.
static void gemm(Matrix a, Matrix b, int rows, int columns, int depth, Product to) {
  constexpr int MANY = Shape::FLOAT_ROWS;
  float *packed = gemm_room(), *transposed = packed + GEMM_DEPTH * GEMM_COLUMNS;
  for (int n = 0; n < columns; n += GEMM_COLUMNS)
    for (int m = 0; m < rows; m += GEMM_ROWS)
      // One iteration even for depth 0, whose product is zero.
      for (int k = 0; k == 0 || k < depth; k += GEMM_DEPTH) {
        const int wide = std::min(GEMM_COLUMNS, columns - n), deep = std::min(GEMM_DEPTH, depth - k);
        const int last = std::min(m + GEMM_ROWS, rows);
        const float* bias = to.bias && k + deep == depth ? to.bias + n : nullptr;
        pack_columns(b.from(k, n), deep, wide, packed);
        for (int i = m; i < last;) {
          const Product there = {to.at + i * to.stride + n, to.stride, bias, to.add || k > 0};
          const Matrix here = a.from(i, k);
          const int left = last - i;
          // Eight are two times four: the low-rank matrices of adapters often have eight rows.
          if (left >= MANY && left != 8) {
            gemm_rows<MANY>(here, MANY, packed, deep, wide, there, transposed);
            i += MANY;
          } else if (left >= 4) {
            gemm_rows<4>(here, 4, packed, deep, wide, there, transposed);
            i += 4;
          } else {
            gemm_rows<1>(here, 1, packed, deep, wide, there, transposed);
            i++;
          }
        }
      }
}

// Divides a product among threads, as a grid of parts that are as square as possible. `one` computes a part, like
// `gemm`.
template <class One>
static void product_shared(Matrix a, Matrix b, int rows, int columns, int depth, Product to, int threads, One one) {
  if (rows <= 0 || columns <= 0) return;
  const double work = (double)rows * columns * std::max(depth, 1);
  threads = (int)std::min<double>(threads, 1 + work / (1 << 18));
  int down = 1;
  for (int d = 1; d <= threads; d++)
    if (threads % d == 0 && rows / d + columns / (threads / d) < rows / down + columns / (threads / down)) down = d;
  const int across = threads / down;
  const auto part = [](int count, int parts, int i, int whole) {
    return std::min(count, (int)((int64_t)((count + whole - 1) / whole) * i / parts) * whole);
  };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int task = 0; task < threads; task++) {
    const int m = part(rows, down, task / across, Shape::FLOAT_ROWS), n = part(columns, across, task % across, 16);
    const int m_end = part(rows, down, task / across + 1, Shape::FLOAT_ROWS);
    const int n_end = part(columns, across, task % across + 1, 16);
    if (m == m_end || n == n_end) continue;
    const Product there = {to.at + m * to.stride + n, to.stride, to.bias ? to.bias + n : nullptr, to.add};
    one(a.from(m, 0), b.from(0, n), m_end - m, n_end - n, depth, there);
  }
}

static void gemm_shared(Matrix a, Matrix b, int rows, int columns, int depth, Product to, int threads) {
  product_shared(a, b, rows, columns, depth, to, threads, gemm);
}

// out [batch, rows, columns] = a [batch, rows, depth] b [batch, depth, columns], matrices `a_step` and `b_step` elements
// apart. Few large products are divided among threads one by one, many small ones as they are.
static void gemm_batch(Matrix a, Matrix b, float* out, int64_t batch, int64_t a_step, int64_t b_step, int rows, int columns,
                       int depth, int threads) {
  const int64_t size = (int64_t)rows * columns;
  const auto one = [&](int64_t i, auto multiply) {
    multiply(Matrix{a.at + i * a_step, a.row, a.column}, Matrix{b.at + i * b_step, b.row, b.column},
             Product{out + i * size, columns, nullptr, false});
  };
  if (batch < threads) {
    for (int64_t i = 0; i < batch; i++)
      one(i, [&](Matrix x, Matrix y, Product to) { gemm_shared(x, y, rows, columns, depth, to, threads); });
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < batch; i++) one(i, [&](Matrix x, Matrix y, Product to) { gemm(x, y, rows, columns, depth, to); });
}
