// AVX-512 with VNNI: one register of sixteen floats.
#pragma once
#include <immintrin.h>

using Floats = __m512;
using Ints = __m512i;

// Rows and panels of tiles whose sums fit the registers: for float sums, for integer sums, and for one or two rows.
struct Shape {
  static constexpr int FLOAT_ROWS = 12, INT_ROWS = 6, WIDE_ROWS = 0, PANELS = 2, PANELS_OF_TWO = 4, PANELS_OF_ONE = 4, INT_PANELS_OF_ONE = 4;
  static constexpr int MIXED_ROWS = 12, MIXED_PANELS = 2;
};

static inline Floats all(float x) { return _mm512_set1_ps(x); }
static inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
static inline Floats load16(const float* at) { return _mm512_loadu_ps(at); }
static inline Floats load16(const uint16_t* at) {
  // A bfloat16 is the upper half of a float32.
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline Floats load_halves(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

static inline void store16(float* at, Floats values) { _mm512_storeu_ps(at, values); }
static inline void store16(uint16_t* at, Floats values) {
  // Round to nearest even; NaN keeps its upper half and becomes quiet.
  __m512i bits = _mm512_castps_si512(values);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Loads and stores of the first `count` of sixteen lanes, at most all; other lanes are loaded from `rest` and not
// stored.
static inline __mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }
static inline Floats load_some(const float* at, int count, Floats rest) {
  return _mm512_mask_loadu_ps(rest, first_lanes(count), at);
}
static inline void store_some(float* at, int count, Floats values) { _mm512_mask_storeu_ps(at, first_lanes(count), values); }

static inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// The larger and the smaller of two; b if one of them is NaN.
static inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, 8); }
// p * 2^n for integer n from -126 to 128.
static inline Floats times_power_of_two(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }
// `power`, but 0 where x < -103, and x where x is NaN.
static inline Floats ordinary_power(Floats x, Floats power) {
  __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-103.0f), _CMP_LT_OQ);
  power = _mm512_mask_mov_ps(power, tiny, _mm512_setzero_ps());
  return _mm512_mask_mov_ps(power, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

// Sum of all lanes: halves are added, then quarters, then eighths, then neighbours.
static inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
static inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
// Masks whose bit i is set if lane i satisfies the condition.
static inline uint32_t equal_lanes(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline uint32_t nan_lanes(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

static inline Ints bits_of(Floats x) { return _mm512_castps_si512(x); }
static inline Ints magnitude_bits(Floats x) { return _mm512_and_si512(bits_of(x), _mm512_set1_epi32(0x7fffffff)); }
static inline Ints larger_ints(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
static inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline int32_t largest_of_ints(Ints x) { return _mm512_reduce_max_epi32(x); }
static inline int32_t sum_of_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
static inline Ints nearest_ints(Floats x) { return _mm512_cvtps_epi32(x); }
static inline Floats floats_of(Ints x) { return _mm512_cvtepi32_ps(x); }
static inline void store_bytes(int8_t* at, Ints x) { _mm_storeu_si128((__m128i*)at, _mm512_cvtsepi32_epi8(x)); }

// Stores two times sixteen numbers as int16, saturated, so that each two neighbours are multiplied by the codes of one
// word: of each four numbers of both in turn, 0 and 2 of the first, 0 and 2 of the second, 1 and 3 of both.
static inline void store_int16(int16_t* at, Ints first, Ints second) {
  const __m512i order = _mm512_set_epi16(31, 29, 15, 13, 30, 28, 14, 12, 27, 25, 11, 9, 26, 24, 10, 8,  //
                                         23, 21, 7, 5, 22, 20, 6, 4, 19, 17, 3, 1, 18, 16, 2, 0);
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(first)), _mm512_cvtsepi32_epi16(second), 1);
  _mm512_storeu_si512(at, _mm512_permutexvar_epi16(order, both));
}

static inline Ints load_ints(const uint8_t* at) { return _mm512_loadu_si512(at); }
static inline Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
static inline Ints or_ints(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int BITS>
static inline Ints right(Ints x) {
  return _mm512_srli_epi32(x, BITS);
}
template <int BITS>
static inline Ints left(Ints x) {
  return _mm512_slli_epi32(x, BITS);
}
static inline Ints load_bytes(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
static inline Ints load_bytes(const int8_t* at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)); }

static inline uint16_t half_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline float float_of_half(uint16_t x) { return _cvtsh_ss(x); }

// Transposes sixteen rows: lane i of row d becomes lane d of row i.
static inline void transpose16(Floats rows[16]) {
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
  // b[4 i + c] holds lanes c, 4 + c, 8 + c and 12 + c of rows 4 i to 4 i + 3, four floats per lane.
  for (int c = 0; c < 4; c++) {
    __m512 low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x44), high = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xee);
    __m512 low2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x44), high2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xee);
    rows[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[8 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

// Byte products: four weights of each of sixteen outputs times the same four inputs, which are from -127 to 127.
using Fours = __m512i;
static inline Fours fours_of(const int8_t* at) {
  int32_t value;
  std::memcpy(&value, at, 4);
  return _mm512_set1_epi32(value);
}

// Adds the products of two int16 codes of each of sixteen outputs and the same two int16 inputs.
static inline Ints add_pairs(Ints sums, Ints codes, Fours inputs) { return _mm512_dpwssd_epi32(sums, codes, inputs); }

// Weights from -128 to 127, stored plus 128.
using ByteWeights = __m512i;
static inline ByteWeights byte_weights(const uint8_t* at) { return _mm512_loadu_si512(at); }
static inline ByteWeights byte_weights_of(Ints x) { return x; }
struct ByteSums {
  __m512i sums;
  // `offset` is -128 times the sum of the inputs.
  explicit ByteSums(int32_t offset) : sums(_mm512_set1_epi32(offset)) {}
  ByteSums() = default;
  void add(ByteWeights weights, Fours inputs) { sums = _mm512_dpbusd_epi32(sums, weights, inputs); }
  Ints total() const { return sums; }
};

// Weights from 0 to 15, those of inputs 0 to 3 in the lower halves of bytes and those of inputs 16 to 19 in the upper.
// A sum is over at most 32 inputs.
struct NibbleWeights {
  __m512i first, second;
};
static inline NibbleWeights nibble_weights(const uint8_t* at) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i both = _mm512_loadu_si512(at);
  return {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
}
struct NibbleSums {
  __m512i sums = _mm512_setzero_si512();
  void add(const NibbleWeights& weights, Fours first, Fours second) {
    sums = _mm512_dpbusd_epi32(sums, weights.first, first);
    sums = _mm512_dpbusd_epi32(sums, weights.second, second);
  }
  Ints total() const { return sums; }
};
