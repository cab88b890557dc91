// Sixteen rows of sixteen floats, turned so that lane i of row d becomes lane d of row i.
#pragma once
#include "simd.hpp"

static inline void turn16(__m512 rows[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int h = 0; h < 2; h++) {
      __m512d one = _mm512_castps_pd(a[4 * i + h]), other = _mm512_castps_pd(a[4 * i + 2 + h]);
      b[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, other));
      b[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(one, other));
    }
  // b[4 i + c] holds, of rows 4 i to 4 i + 3, lanes c, 4 + c, 8 + c and 12 + c, four floats each.
  for (int c = 0; c < 4; c++) {
    __m512 low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x44), high = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xee);
    __m512 low2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x44), high2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xee);
    rows[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[8 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

// Keys [16, size] where they lie become `turned` [size, 16]; past the last of `here` keys it is repeated.
template <class Element>
static inline void turn_keys(const Element* keys, int64_t row, const int64_t* numbers, int here, int size,
                             float* turned) {
  for (int d = 0; d < size; d += 16) {
    __m512 lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = load16(keys + numbers[std::min(i, here - 1)] * row + d);
    turn16(lanes);
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(turned + (d + i) * 16, lanes[i]);
  }
}
