// Products of a few rows with a few panels of sixteen outputs. Every output is summed over its inputs in one fixed order,
// whatever the number of rows, so a row's result never depends on the company it is computed in.
#pragma once
#include "activations.hpp"

struct Linear {
  int32_t format, inputs, outputs;
  int32_t parts;           // of tiles: how many bfloat16 or int8 numbers an input becomes
  const void* weights;     // panels of sixteen outputs; see pack.hpp
  const uint16_t* scales;  // int4: half floats [panel, group, 2, 16], step and least value
  const float* steps;      // int8: [outputs rounded up to 16]
  const float* bias;       // [outputs rounded up to 16] or null
};

struct Into {
  float* out;
  size_t stride;
  bool add;
};

static inline void finish(const Linear& l, Into to, int row, int panel, __m512 value) {
  int n = panel * 16, left = std::min(16, l.outputs - n);
  __mmask16 mask = left == 16 ? 0xffff : (__mmask16)((1u << left) - 1);
  float* at = to.out + row * to.stride + n;
  if (l.bias) value = _mm512_add_ps(value, _mm512_loadu_ps(l.bias + n));
  if (to.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, at));
  _mm512_mask_storeu_ps(at, mask, value);
}

template <int ROWS, int PANELS, class Element>
static void float_tile(const Linear& l, const float* x, int row, int panel, Into to) {
  const size_t inputs = l.inputs;
  const Element* w = (const Element*)l.weights + (size_t)panel * inputs * 16;
  x += row * inputs;
  __m512 sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_setzero_ps();
  for (size_t k = 0; k < inputs; k++) {
    __m512 weight[PANELS];
    for (int p = 0; p < PANELS; p++) weight[p] = load16(w + p * inputs * 16 + k * 16);
    for (int r = 0; r < ROWS; r++) {
      __m512 value = _mm512_set1_ps(x[r * inputs + k]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_fmadd_ps(value, weight[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}

static inline __m512i four(const int8_t* at) {
  int32_t value;
  std::memcpy(&value, at, 4);
  return _mm512_set1_epi32(value);
}

template <int ROWS, int PANELS>
static void int8_tile(const Linear& l, const QuantisedRows& x, int row, int panel, Into to) {
  const size_t inputs = l.inputs, groups = inputs / GROUP;
  const uint8_t* w = (const uint8_t*)l.weights + (size_t)panel * inputs * 16;
  const int8_t* values = x.values + row * inputs;
  const float* scale = x.scale + row * groups;
  const int32_t* offset = x.offset + row * groups;
  __m512 sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_setzero_ps();
  for (size_t g = 0; g < groups; g++) {
    __m512i dot[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) dot[r][p] = _mm512_set1_epi32(offset[r * groups + g]);
    // Unrolled, as compilers (g++ 12) copy every sum once in each turn of the loop.
#pragma GCC unroll 8
    for (int s = 0; s < GROUP / 4; s++) {
      __m512i weight[PANELS];
      for (int p = 0; p < PANELS; p++) weight[p] = _mm512_loadu_si512(w + p * inputs * 16 + (g * 8 + s) * 64);
      for (int r = 0; r < ROWS; r++) {
        __m512i value = four(values + r * inputs + g * GROUP + s * 4);
        for (int p = 0; p < PANELS; p++) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], weight[p], value);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++)
        sum[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][p]), _mm512_set1_ps(scale[r * groups + g]), sum[r][p]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++)
      finish(l, to, row + r, panel + p, _mm512_mul_ps(sum[r][p], _mm512_loadu_ps(l.steps + (panel + p) * 16)));
}

template <int ROWS, int PANELS>
static void int4_tile(const Linear& l, const QuantisedRows& x, int row, int panel, Into to) {
  const size_t inputs = l.inputs, groups = inputs / GROUP;
  const uint8_t* w = (const uint8_t*)l.weights + (size_t)panel * inputs * 8;
  const uint16_t* scales = l.scales + (size_t)panel * groups * 32;
  const int8_t* values = x.values + row * inputs;
  const float *scale = x.scale + row * groups, *total = x.sum + row * groups;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_setzero_ps();
  for (size_t g = 0; g < groups; g++) {
    __m512i dot[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) dot[r][p] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int s = 0; s < GROUP / 8; s++) {
      __m512i first[PANELS], second[PANELS];
      for (int p = 0; p < PANELS; p++) {
        __m512i both = _mm512_loadu_si512(w + p * inputs * 8 + (g * 4 + s) * 64);
        first[p] = _mm512_and_si512(both, low);
        second[p] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
      for (int r = 0; r < ROWS; r++) {
        const int8_t* at = values + r * inputs + g * GROUP + s * 4;
        __m512i one = four(at), other = four(at + 16);
        for (int p = 0; p < PANELS; p++) {
          dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], first[p], one);
          dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], second[p], other);
        }
      }
    }
    for (int p = 0; p < PANELS; p++) {
      const __m256i* at = (const __m256i*)(scales + ((size_t)p * groups + g) * 32);
      __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256(at)), least = _mm512_cvtph_ps(_mm256_loadu_si256(at + 1));
      for (int r = 0; r < ROWS; r++) {
        __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][p]), _mm512_set1_ps(scale[r * groups + g]));
        sum[r][p] = _mm512_fmadd_ps(scaled, step, sum[r][p]);
        sum[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(total[r * groups + g]), least, sum[r][p]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}
