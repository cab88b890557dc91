// Rows of activations as inputs of linear layers: float32, or int8 with a scale per 32 neighbours.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.hpp"

constexpr int GROUP = 32;

// x[row, k] is about scale[row, k / 32] * values[row, k]. A group that holds NaN or infinity gets the scale NaN.
struct Quantised {
  std::vector<int8_t> values;
  std::vector<float> scale, sum;
  std::vector<int32_t> offset;

  void resize(int rows, int width) {
    values.resize((size_t)rows * width);
    scale.resize((size_t)rows * width / GROUP);
    sum.resize(scale.size());
    offset.resize(scale.size());
  }
};

// A view of some rows of a `Quantised`.
struct QuantisedRows {
  const int8_t* values;
  const float *scale, *sum;
  const int32_t* offset;
  const int32_t* first = nullptr;  // like `offset`, for the first sixteen of a group; only for formats that need it

  QuantisedRows from(size_t row, size_t width) const {
    size_t groups = row * width / GROUP;
    return {values + row * width, scale + groups, sum + groups, offset + groups, first ? first + groups : nullptr};
  }
};

// Quantizes thirty-two floats to `values` times `scale`; also `sum`, their scaled sum, and `offset`, -128 times the sum
// of the integers.
static inline void quantise_group(const float* x, int8_t* values, float* scale, float* sum, int32_t* offset) {
  Floats a = load16(x), b = load16(x + 16);
  // The bits of magnitudes, compared as integers, have the order of the floats, and NaN is the largest.
  int32_t top = largest_of_ints(larger_ints(magnitude_bits(a), magnitude_bits(b)));
  float largest;
  std::memcpy(&largest, &top, 4);
  bool finite = top < 0x7f800000;
  float step = largest / 127.0f;
  Floats inverse = all(finite && step > 1e-36f ? 1.0f / step : 0.0f);
  Ints ia = all_ints(0), ib = ia;
  if (finite) {
    ia = nearest_ints(a * inverse);
    ib = nearest_ints(b * inverse);
  }
  store_bytes(values, ia);
  store_bytes(values + 16, ib);
  int32_t total = sum_of_ints(add_ints(ia, ib));
  *scale = finite ? step : std::numeric_limits<float>::quiet_NaN();
  *sum = *scale * (float)total;
  *offset = -128 * total;
}

static inline void quantise_row(const float* x, int width, int8_t* values, float* scale, float* sum, int32_t* offset) {
  for (int g = 0; g < width / GROUP; g++) quantise_group(x + g * GROUP, values + g * GROUP, scale + g, sum + g, offset + g);
}

static inline void rms_norm_row(const float* x, int width, const float* gain, float eps, float* out) {
  Floats total = all(0.0f);
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    Floats v = load16(x + i);
    total = fmadd(v, v, total);
  }
  float squares = sum_of(total);
  for (int j = i; j < width; j++) squares += x[j] * x[j];
  float factor = 1.0f / std::sqrt(squares / (float)width + eps);
  Floats f = all(factor);
  for (int j = 0; j < i; j += 16) store16(out + j, load16(x + j) * f * load16(gain + j));
  for (int j = i; j < width; j++) out[j] = x[j] * factor * gain[j];
}

static inline Floats silu_gate(Floats gate, Floats up) { return gate / (all(1.0f) + exp16(all(0.0f) - gate)) * up; }

// silu(gate) * up of one row [gate, up], each `width` (a multiple of 16) wide.
static inline void silu_gate_row(const float* both, int width, float* out) {
  for (int i = 0; i < width; i += 16) store16(out + i, silu_gate(load16(both + i), load16(both + width + i)));
}
