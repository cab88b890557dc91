// The epilogue of AMX products: sums of rows with two panels are combined, scaled, gated and stored.
#pragma once
#include "rows.hpp"

struct Bfloat16Dots;
struct Int8Dots;

// How inputs are split and their sums combined: an input becomes PARTS numbers, in ROWS rows of a tile; `whole`
// combines the sums of a row.
struct OnePart {
  using Dots = Bfloat16Dots;
  static constexpr int PARTS = 1, ROWS = 1;
  static __m512 whole(const RowTiles&, int, const float* sums, __m512) { return _mm512_load_ps(sums); }
};

// The products of the three parts are added to one sum. A register sums 32 inputs before adding them to its
// accumulator, so sums still round less often than in float32.
struct ThreeParts : OnePart {
  static constexpr int PARTS = 3;
};

struct WholeNumbers {
  using Dots = Int8Dots;
  static constexpr int PARTS = 2, ROWS = 2;
  static __m512 whole(const RowTiles& x, int row, const float* sums, __m512 steps) {
    __m512 upper = _mm512_cvtepi32_ps(_mm512_load_si512(sums)), lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 16));
    __m512 dots = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
    return _mm512_mul_ps(_mm512_mul_ps(dots, _mm512_set1_ps(x.steps[row])), steps);
  }
};

// The steps (int8) and the bias of one panel of a layer.
struct OfPanel {
  const float *steps, *bias;

  OfPanel(const Linear& l, int panel)
      : steps(l.steps ? l.steps + panel * 16 : nullptr), bias(l.bias ? l.bias + panel * 16 : nullptr) {}

  template <class Parts>
  __m512 whole(const RowTiles& x, int row, const float* sums) const {
    __m512 value = Parts::whole(x, row, sums, steps ? _mm512_loadu_ps(steps) : _mm512_setzero_ps());
    return bias ? _mm512_add_ps(value, _mm512_loadu_ps(bias)) : value;
  }
};

// Pairs of neighbouring panels of a layer, and the destination of their sums.
struct Neighbours {
  const Linear& l;
  Into to;

  int count() const { return (l.outputs + PAIR - 1) / PAIR; }
  int panel(int pair) const { return 2 * pair; }
  int apart() const { return 1; }

  template <class Parts>
  void finish(const RowTiles& x, int pair, int row, const float* sums) const {
    for (int p = 0; p < 2 && (2 * pair + p) * 16 < l.outputs; p++, sums += 256) {
      int panel = 2 * pair + p, left = l.outputs - panel * 16;
      const __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
      float* at = to.out + row * to.stride + panel * 16;
      __m512 value = OfPanel(l, panel).whole<Parts>(x, row, sums);
      if (to.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, at));
      _mm512_mask_storeu_ps(at, mask, value);
    }
  }
};

// Destinations for sixteen columns of a row at a time: `ToRows` for rows of floats, `ToTiles` for tiles of bfloat16.
struct ToRows {
  float* out;
  size_t width;
  void put(int row, int column, __m512 values) const { _mm512_storeu_ps(out + row * width + column, values); }
  void fill(int, int) const {}
};

struct ToTiles {
  RowTiles x;
  uint16_t* at(int row, int column) const {
    return x.at + row / 16 * x.apart() + column / DEPTH * x.deep() * TILE + row % 16 * DEPTH + column % DEPTH;
  }
  void put(int row, int column, __m512 values) const { put_parts(values, x.deep(), at(row, column)); }
  // Columns past the last, up to a whole tile, are set to zero, because they must not be NaN.
  void fill(int row, int column) const {
    if (column % DEPTH) put(row, column, _mm512_setzero_ps());
  }
};

// Pairs of a gate panel and an up panel of one layer with outputs [gate, up]: silu(gate) * up of each row.
template <class To>
struct Gated {
  const Linear& l;
  To to;

  int count() const { return l.outputs / PAIR; }
  int panel(int pair) const { return pair; }
  int apart() const { return count(); }

  template <class Parts>
  void finish(const RowTiles& x, int pair, int row, const float* sums) const {
    __m512 gate = OfPanel(l, pair).whole<Parts>(x, row, sums);
    __m512 up = OfPanel(l, pair + apart()).whole<Parts>(x, row, sums + 256);
    to.put(row, pair * 16, silu_gate(gate, up));
    if (pair + 1 == count()) to.fill(row, (pair + 1) * 16);
  }
};
