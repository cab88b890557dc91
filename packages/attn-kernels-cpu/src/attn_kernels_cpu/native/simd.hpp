// Sixteen floats at a time (AVX-512): sums, exponentials, loads of the element types that states and weights have.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, BFLOAT16_PAIRS = 4, INT8_FOURS = 5 };

static inline __m512 load16(const float* at) { return _mm512_loadu_ps(at); }

static inline __m512 load16(const uint16_t* at) {
  // A bfloat16 is the upper half of a float32.
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store16(float* at, __m512 values) { _mm512_storeu_ps(at, values); }

static inline void store16(uint16_t* at, __m512 values) {
  // Round to even; NaN keeps its upper half, made quiet.
  __m512i bits = _mm512_castps_si512(values);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// e^x to 2 units in the last place; 0 for -inf, NaN stays NaN.
static inline __m512 exp16(__m512 x) {
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  __m512 y = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(88.7f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  p = _mm512_scalef_ps(p, n);
  __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-103.0f), _CMP_LT_OQ);
  p = _mm512_mask_mov_ps(p, tiny, _mm512_setzero_ps());
  return _mm512_mask_mov_ps(p, nan, x);
}

// Lane i of the result is the sum of the lanes of rows[i].
static inline __m512 sums16(const __m512 rows[16]) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                         _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))));
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
