// Rows of activations as linear layers take them: float32, or int8 with a scale for every 32 neighbours.
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

// Where some of the rows of a `Quantised` begin.
struct QuantisedRows {
  const int8_t* values;
  const float *scale, *sum;
  const int32_t* offset;

  QuantisedRows from(size_t row, size_t width) const {
    size_t groups = row * width / GROUP;
    return {values + row * width, scale + groups, sum + groups, offset + groups};
  }
};

// Thirty-two floats as `values`, of which each counts `scale`; `sum` of them, and -128 times their sum as whole numbers.
static inline void quantise_group(const float* x, int8_t* values, float* scale, float* sum, int32_t* offset) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  // As integers the magnitudes of floats keep their order, and NaN comes last.
  int top = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                                     _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
  float largest;
  std::memcpy(&largest, &top, 4);
  bool finite = top < 0x7f800000;
  float step = largest / 127.0f;
  __m512 inverse = _mm512_set1_ps(finite && step > 1e-36f ? 1.0f / step : 0.0f);
  __m512i ia = _mm512_setzero_si512(), ib = ia;
  if (finite) {
    ia = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
    ib = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  }
  _mm_storeu_si128((__m128i*)values, _mm512_cvtsepi32_epi8(ia));
  _mm_storeu_si128((__m128i*)(values + 16), _mm512_cvtsepi32_epi8(ib));
  int total = _mm512_reduce_add_epi32(_mm512_add_epi32(ia, ib));
  *scale = finite ? step : std::numeric_limits<float>::quiet_NaN();
  *sum = *scale * (float)total;
  *offset = -128 * total;
}

static inline void quantise_row(const float* x, int width, int8_t* values, float* scale, float* sum, int32_t* offset) {
  for (int g = 0; g < width / GROUP; g++) quantise_group(x + g * GROUP, values + g * GROUP, scale + g, sum + g, offset + g);
}

static inline void rms_norm_row(const float* x, int width, const float* gain, float eps, float* out) {
  __m512 total = _mm512_setzero_ps();
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    __m512 v = _mm512_loadu_ps(x + i);
    total = _mm512_fmadd_ps(v, v, total);
  }
  float squares = _mm512_reduce_add_ps(total);
  for (int j = i; j < width; j++) squares += x[j] * x[j];
  float factor = 1.0f / std::sqrt(squares / (float)width + eps);
  __m512 f = _mm512_set1_ps(factor);
  for (int j = 0; j < i; j += 16)
    _mm512_storeu_ps(out + j, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + j), f), _mm512_loadu_ps(gain + j)));
  for (int j = i; j < width; j++) out[j] = x[j] * factor * gain[j];
}

static inline __m512 silu_gate(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 below = _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
  return _mm512_mul_ps(_mm512_div_ps(gate, below), up);
}

// silu(gate) * up of one row [gate, up], each `width` (a multiple of 16) wide.
static inline void silu_gate_row(const float* both, int width, float* out) {
  for (int i = 0; i < width; i += 16)
    _mm512_storeu_ps(out + i, silu_gate(_mm512_loadu_ps(both + i), _mm512_loadu_ps(both + width + i)));
}
