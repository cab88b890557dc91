// Splitting rows of float32 into sums of bfloat16 or int8 numbers, in AMX tiles of sixteen rows by 64 bytes.
#pragma once
#include <limits>
#include <vector>

#include "tiles.hpp"

constexpr float MOST_STEPS = 32512;  // 127 * 256: the largest magnitude of 256 times an int8 number plus another one
constexpr uint32_t UPPER = 0xffff0000;

// A growing buffer that is aligned to a cache line.
struct TileMemory {
  std::vector<uint16_t> room;
  uint16_t* of(size_t elements) {
    if (room.size() < elements + 32) room.resize(elements + 32);
    return (uint16_t*)(((uintptr_t)room.data() + 63) / 64 * 64);
  }
};

// Returns the upper sixteen bits of x, a bfloat16 near x, and leaves the rest in x: zero if x is not finite.
static inline __m512i upper_part(__m512& x) {
  __m512i bits = _mm512_castps_si512(x);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  // Without this, a NaN with its payload in the lower half would become infinity.
  bits = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x00400000));
  __m512i upper = _mm512_and_si512(bits, _mm512_set1_epi32(UPPER));
  __mmask16 finite = _mm512_cmplt_epu32_mask(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)),
                                             _mm512_set1_epi32(0x7f800000));
  x = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(upper));
  return upper;
}

static inline void put_upper(uint16_t* at, __m512i bits) {
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

// Splits sixteen inputs of a row into three bfloat16 numbers that add up to them exactly, in consecutive tiles.
static inline void three_parts(__m512 x, uint16_t* at) {
  for (int part = 0; part < 3; part++) put_upper(at + part * TILE, upper_part(x));
}

static inline void put_parts(__m512 x, int parts, uint16_t* at) {
  if (parts == 3)
    three_parts(x, at);
  else
    store16(at, x);
}

// Loads the first `left` of sixteen floats; the others are zero.
static inline __m512 some(const float* x, int left) {
  return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0, x);
}

// Splits a row of `inputs` floats into rows of tiles, `parts` tiles per 32 inputs; inputs past the last are zero.
static inline void split_row(const float* x, int inputs, int parts, uint16_t* tiles) {
  for (int k = 0; k < (inputs + DEPTH - 1) / DEPTH * DEPTH; k += 16) {
    __m512 values = some(x + k, inputs - k);
    uint16_t* at = tiles + (size_t)(k / DEPTH) * parts * TILE + k % DEPTH;
    put_parts(values, parts, at);
  }
}

// Quantizes a row of floats to integer multiples of a step, each 256 times one int8 number plus another, in two rows of
// tiles. Returns the step; NaN if the row contains NaN or infinity.
static inline float whole_row(const float* x, int inputs, uint8_t* tiles) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i top = _mm512_setzero_si512();
  // The bits of magnitudes, compared as integers, have the order of the floats, and NaN is the largest.
  for (int k = 0; k < inputs; k += 16)
    top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(some(x + k, inputs - k)), magnitude));
  int most = _mm512_reduce_max_epi32(top);
  float largest;
  std::memcpy(&largest, &most, 4);
  bool finite = most < 0x7f800000;
  float step = largest / MOST_STEPS;
  const __m512 inverse = _mm512_set1_ps(finite && step > 1e-36f ? 1.0f / step : 0.0f);
  for (int k = 0; k < (inputs + INT8_DEPTH - 1) / INT8_DEPTH * INT8_DEPTH; k += 16) {
    __m512i steps = _mm512_setzero_si512();
    if (finite) steps = _mm512_cvtps_epi32(_mm512_mul_ps(some(x + k, inputs - k), inverse));
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(steps, _mm512_set1_epi32(128)), 8);
    uint8_t* at = tiles + (size_t)(k / INT8_DEPTH) * TILE * 2 + k % INT8_DEPTH;
    _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)(at + INT8_DEPTH), _mm512_cvtepi32_epi8(_mm512_sub_epi32(steps, _mm512_slli_epi32(upper, 8))));
  }
  return finite ? step : std::numeric_limits<float>::quiet_NaN();
}
