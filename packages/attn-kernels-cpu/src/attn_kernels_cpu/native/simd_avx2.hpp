// AVX2 with FMA and F16C: two registers of eight floats each. With AVX-VNNI, its instructions are used for byte
// products.
#pragma once
#include <immintrin.h>

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

struct Shape {
  static constexpr int FLOAT_ROWS = 6, INT_ROWS = 4, WIDE_ROWS = 6, PANELS = 1;
  // As many sums as fit sixteen registers together with their weights: with four panels bfloat16 took 1.7 times as
  // long.
  static constexpr int PANELS_OF_TWO = 2, PANELS_OF_ONE = 3, INT_PANELS_OF_ONE = 2;
  static constexpr int MIXED_ROWS = 6, MIXED_PANELS = 1;
};

static inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
static inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

static inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Floats load16(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
static inline __m256 widened(const uint16_t* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
static inline Floats load16(const uint16_t* at) { return {widened(at), widened(at + 8)}; }
static inline Floats load_halves(const uint16_t* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 8)))};
}

static inline void store16(float* at, Floats values) {
  _mm256_storeu_ps(at, values.low);
  _mm256_storeu_ps(at + 8, values.high);
}
static inline __m256i upper_halves(__m256 values) {
  __m256i bits = _mm256_castps_si256(values);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
static inline void store16(uint16_t* at, Floats values) {
  // The pack instruction interleaves quarters.
  __m256i packed = _mm256_packus_epi32(upper_halves(values.low), upper_halves(values.high));
  _mm256_storeu_si256((__m256i*)at, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Floats load_some(const float* at, int count, Floats rest) {
  if (count >= 16) return load16(at);
  __m256i low = first_lanes(count), high = first_lanes(count - 8);
  return {_mm256_blendv_ps(rest.low, _mm256_maskload_ps(at, low), _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(rest.high, _mm256_maskload_ps(at + 8, high), _mm256_castsi256_ps(high))};
}
static inline void store_some(float* at, int count, Floats values) {
  if (count >= 16) return store16(at, values);
  _mm256_maskstore_ps(at, first_lanes(count), values.low);
  _mm256_maskstore_ps(at + 8, first_lanes(count - 8), values.high);
}

static inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
static inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
static inline Floats rounded(Floats x) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }

// In two steps, because 2^128 is not a float; the first step is exact.
static inline __m256 scaled(__m256 p, __m256 n) {
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
static inline Floats times_power_of_two(Floats p, Floats n) { return {scaled(p.low, n.low), scaled(p.high, n.high)}; }
static inline __m256 ordinary(__m256 x, __m256 power) {
  power = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-103.0f), _CMP_LT_OQ), power);
  return _mm256_blendv_ps(power, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
static inline Floats ordinary_power(Floats x, Floats power) { return {ordinary(x.low, power.low), ordinary(x.high, power.high)}; }

static inline float sum_of(Floats x) {
  __m256 eight = _mm256_add_ps(x.high, x.low);
  __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float largest_of(Floats x) {
  __m256 eight = _mm256_max_ps(x.high, x.low);
  __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline uint32_t equal_lanes(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)) << 8;
}
static inline uint32_t nan_lanes(Floats x) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q)) |
         _mm256_movemask_ps(_mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q)) << 8;
}

static inline Ints magnitude_bits(Floats x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.low), mask), _mm256_and_si256(_mm256_castps_si256(x.high), mask)};
}
static inline Ints larger_ints(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
static inline Ints add_ints(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
static inline int32_t largest_of_ints(Ints x) {
  __m256i eight = _mm256_max_epi32(x.low, x.high);
  __m128i four = _mm_max_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
static inline int32_t sum_of_ints(Ints x) {
  __m256i eight = _mm256_add_epi32(x.low, x.high);
  __m128i four = _mm_add_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
static inline Ints nearest_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
static inline Floats floats_of(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
static inline void store_bytes(int8_t* at, Ints x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  _mm_storeu_si128((__m128i*)at, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

static inline __m256i as_int16(Ints x) {
  // The order of each four numbers that `store_int16` needs: 0, 2, 1, 3.
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8), order);
}
static inline void store_int16(int16_t* at, Ints first, Ints second) {
  __m256i a = as_int16(first), b = as_int16(second);
  __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  _mm256_storeu_si256((__m256i*)at, _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256((__m256i*)(at + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

static inline Ints load_ints(const uint8_t* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)(at + 32))};
}
static inline Ints and_ints(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
static inline Ints or_ints(Ints a, Ints b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
template <int BITS>
static inline Ints right(Ints x) {
  return {_mm256_srli_epi32(x.low, BITS), _mm256_srli_epi32(x.high, BITS)};
}
template <int BITS>
static inline Ints left(Ints x) {
  return {_mm256_slli_epi32(x.low, BITS), _mm256_slli_epi32(x.high, BITS)};
}
static inline Ints load_bytes(const uint8_t* at) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8)))};
}
static inline Ints load_bytes(const int8_t* at) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8)))};
}

static inline uint16_t half_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline float float_of_half(uint16_t x) { return _cvtsh_ss(x); }

static inline void transpose8(__m256 rows[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++)
    for (int h = 0; h < 2; h++) {
      __m256d one = _mm256_castps_pd(a[4 * i + h]), other = _mm256_castps_pd(a[4 * i + 2 + h]);
      b[4 * i + 2 * h] = _mm256_castpd_ps(_mm256_unpacklo_pd(one, other));
      b[4 * i + 2 * h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(one, other));
    }
  for (int c = 0; c < 4; c++) {
    rows[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}
static inline void transpose16(Floats rows[16]) {
  __m256 part[2][2][8];
  for (int i = 0; i < 16; i++) {
    part[i / 8][0][i % 8] = rows[i].low;
    part[i / 8][1][i % 8] = rows[i].high;
  }
  for (int i = 0; i < 4; i++) transpose8(part[i / 2][i % 2]);
  for (int i = 0; i < 16; i++) rows[i] = {part[0][i / 8][i % 8], part[1][i / 8][i % 8]};
}

using Fours = __m256i;
static inline Fours fours_of(const int8_t* at) {
  int32_t value;
  std::memcpy(&value, at, 4);
  return _mm256_set1_epi32(value);
}

#ifdef __AVXVNNI__
static inline Ints add_pairs(Ints sums, Ints codes, Fours inputs) {
  return {_mm256_dpwssd_avx_epi32(sums.low, codes.low, inputs), _mm256_dpwssd_avx_epi32(sums.high, codes.high, inputs)};
}

struct ByteWeights {
  __m256i low, high;
};
static inline ByteWeights byte_weights(const uint8_t* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)(at + 32))};
}
static inline ByteWeights byte_weights_of(Ints x) { return {x.low, x.high}; }
struct ByteSums {
  Ints sums;
  explicit ByteSums(int32_t offset) : sums(all_ints(offset)) {}
  ByteSums() = default;
  void add(const ByteWeights& weights, Fours inputs) {
    sums = {_mm256_dpbusd_avx_epi32(sums.low, weights.low, inputs), _mm256_dpbusd_avx_epi32(sums.high, weights.high, inputs)};
  }
  Ints total() const { return sums; }
};
#else
// Returns x, computed at this point: g++ 12 delays integer additions until the sum is read and keeps the summands in
// memory.
static inline Ints in_order(Ints x) {
  asm("" : "+x"(x.low), "+x"(x.high));
  return x;
}

static inline Ints add_pairs(Ints sums, Ints codes, Fours inputs) {
  return in_order(add_ints(sums, {_mm256_madd_epi16(codes.low, inputs), _mm256_madd_epi16(codes.high, inputs)}));
}

// Products of two bytes are added in 16 bits, which do not overflow for a magnitude times a signed byte.
struct ByteWeights {
  __m256i low, high, low_magnitudes, high_magnitudes;
};
static inline ByteWeights byte_weights_of(Ints x) {
  const __m256i zero = _mm256_set1_epi8((char)128);
  __m256i low = _mm256_xor_si256(x.low, zero), high = _mm256_xor_si256(x.high, zero);
  return {low, high, _mm256_abs_epi8(low), _mm256_abs_epi8(high)};
}
static inline ByteWeights byte_weights(const uint8_t* at) { return byte_weights_of(load_ints(at)); }
struct ByteSums {
  Ints sums;
  // Weights are converted to signed bytes, so there is no offset.
  explicit ByteSums(int32_t) : sums(all_ints(0)) {}
  ByteSums() = default;
  void add(const ByteWeights& weights, Fours inputs) {
    const __m256i one = _mm256_set1_epi16(1);
    __m256i low = _mm256_maddubs_epi16(weights.low_magnitudes, _mm256_sign_epi8(inputs, weights.low));
    __m256i high = _mm256_maddubs_epi16(weights.high_magnitudes, _mm256_sign_epi8(inputs, weights.high));
    sums = in_order(add_ints(sums, {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)}));
  }
  Ints total() const { return sums; }
};
#endif

struct NibbleWeights {
  Ints first, second;
};
static inline NibbleWeights nibble_weights(const uint8_t* at) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i low = _mm256_loadu_si256((const __m256i*)at), high = _mm256_loadu_si256((const __m256i*)(at + 32));
  return {{_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)},
          {_mm256_and_si256(_mm256_srli_epi16(low, 4), mask), _mm256_and_si256(_mm256_srli_epi16(high, 4), mask)}};
}
struct NibbleSums {
  Ints sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#ifdef __AVXVNNI__
  void add(const NibbleWeights& weights, Fours first, Fours second) {
    sums = {_mm256_dpbusd_avx_epi32(sums.low, weights.first.low, first),
            _mm256_dpbusd_avx_epi32(sums.high, weights.first.high, first)};
    sums = {_mm256_dpbusd_avx_epi32(sums.low, weights.second.low, second),
            _mm256_dpbusd_avx_epi32(sums.high, weights.second.high, second)};
  }
  Ints total() const { return sums; }
#else
  // Summed in 16 bits, which suffice: sixteen products of 15 and 127 are 30480.
  void add(const NibbleWeights& weights, Fours first, Fours second) {
    __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(weights.first.low, first), _mm256_maddubs_epi16(weights.second.low, second));
    __m256i high = _mm256_add_epi16(_mm256_maddubs_epi16(weights.first.high, first), _mm256_maddubs_epi16(weights.second.high, second));
    sums = in_order({_mm256_add_epi16(sums.low, low), _mm256_add_epi16(sums.high, high)});
  }
  Ints total() const {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sums.low, one), _mm256_madd_epi16(sums.high, one)};
  }
#endif
};
