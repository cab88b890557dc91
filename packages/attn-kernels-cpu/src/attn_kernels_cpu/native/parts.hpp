// Rows of float32 as sums of bfloat16 numbers, in tiles of sixteen rows by thirty-two inputs (1 KB), as AMX multiplies them.
#pragma once
#include <algorithm>

#include "simd.hpp"

constexpr int DEPTH = 32;            // inputs of a tile
constexpr int TILE = 16 * DEPTH;     // elements of a tile
constexpr uint32_t UPPER = 0xffff0000;

// The first sixteen bits, which are a bfloat16 near x, and what is left of x: zero of what is not finite.
static inline __m512i upper_part(__m512& x) {
  __m512i bits = _mm512_castps_si512(x);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  // A NaN whose payload is in its lower half would become infinity.
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

// Sixteen inputs of a row as three bfloat16 numbers that add up to them exactly, one below another (rows of a tile).
static inline void three_parts(__m512 x, uint16_t* at) {
  for (int part = 0; part < 3; part++) put_upper(at + part * DEPTH, upper_part(x));
}

// A row of `inputs` floats as `parts` rows of tiles that lie TILE elements apart; inputs past the last are zero.
static inline void split_row(const float* x, int inputs, int parts, uint16_t* tiles) {
  for (int k = 0; k < (inputs + DEPTH - 1) / DEPTH * DEPTH; k += 16) {
    int left = std::max(0, inputs - k);
    __m512 values = _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1), x + k);
    uint16_t* at = tiles + (size_t)(k / DEPTH) * TILE + k % DEPTH;
    if (parts == 3)
      three_parts(values, at);
    else
      store16(at, values);
  }
}
