// NEON with dot products (ARMv8.2): four registers of four floats each.
#pragma once
#include <arm_neon.h>

struct Floats {
  float32x4_t of[4];
};
struct Ints {
  int32x4_t of[4];
};

struct Shape {
  static constexpr int FLOAT_ROWS = 4, INT_ROWS = 4, WIDE_ROWS = 0, PANELS = 1, PANELS_OF_TWO = 2, PANELS_OF_ONE = 4, INT_PANELS_OF_ONE = 4;
  static constexpr int MIXED_ROWS = 4, MIXED_PANELS = 1;
};

// The four registers that a function returns for their numbers, 0 to 3.
template <class To, class Of>
static inline To of_each(Of of) {
  return {{of(0), of(1), of(2), of(3)}};
}

static inline Floats operator+(Floats a, Floats b) { return of_each<Floats>([&](int i) { return vaddq_f32(a.of[i], b.of[i]); }); }
static inline Floats operator-(Floats a, Floats b) { return of_each<Floats>([&](int i) { return vsubq_f32(a.of[i], b.of[i]); }); }
static inline Floats operator*(Floats a, Floats b) { return of_each<Floats>([&](int i) { return vmulq_f32(a.of[i], b.of[i]); }); }
static inline Floats operator/(Floats a, Floats b) { return of_each<Floats>([&](int i) { return vdivq_f32(a.of[i], b.of[i]); }); }

static inline Floats all(float x) { return of_each<Floats>([&](int) { return vdupq_n_f32(x); }); }
static inline Ints all_ints(int32_t x) { return of_each<Ints>([&](int) { return vdupq_n_s32(x); }); }
static inline Floats load16(const float* at) { return of_each<Floats>([&](int i) { return vld1q_f32(at + 4 * i); }); }
static inline Floats load16(const uint16_t* at) {
  return of_each<Floats>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at + 4 * i), 16)); });
}
static inline Floats load_halves(const uint16_t* at) {
  return of_each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i))); });
}

static inline void store16(float* at, Floats values) {
  for (int i = 0; i < 4; i++) vst1q_f32(at + 4 * i, values.of[i]);
}
static inline void store16(uint16_t* at, Floats values) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t bits = vreinterpretq_u32_f32(values.of[i]);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t number = vceqq_f32(values.of[i], values.of[i]);
    rounded = vbslq_u32(number, rounded, vorrq_u32(bits, vdupq_n_u32(0x00400000)));
    vst1_u16(at + 4 * i, vshrn_n_u32(rounded, 16));
  }
}

static inline Floats load_some(const float* at, int count, Floats rest) {
  if (count >= 16) return load16(at);
  float room[16];
  store16(room, rest);
  if (count > 0) std::memcpy(room, at, sizeof(float) * count);
  return load16(room);
}
static inline void store_some(float* at, int count, Floats values) {
  if (count >= 16) return store16(at, values);
  float room[16];
  store16(room, values);
  if (count > 0) std::memcpy(at, room, sizeof(float) * count);
}

static inline Floats fmadd(Floats a, Floats b, Floats c) {
  return of_each<Floats>([&](int i) { return vfmaq_f32(c.of[i], a.of[i], b.of[i]); });
}
static inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return of_each<Floats>([&](int i) { return vfmsq_f32(c.of[i], a.of[i], b.of[i]); });
}
// The larger of two; the second if one of them is NaN, as on other CPUs.
static inline float32x4_t larger4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Floats larger(Floats a, Floats b) { return of_each<Floats>([&](int i) { return larger4(a.of[i], b.of[i]); }); }
static inline Floats smaller(Floats a, Floats b) {
  return of_each<Floats>([&](int i) { return vbslq_f32(vcltq_f32(a.of[i], b.of[i]), a.of[i], b.of[i]); });
}
static inline Floats rounded(Floats x) { return of_each<Floats>([&](int i) { return vrndnq_f32(x.of[i]); }); }

// In two steps, because 2^128 is not a float; the first step is exact.
static inline Floats times_power_of_two(Floats p, Floats n) {
  return of_each<Floats>([&](int i) {
    int32x4_t whole = vcvtnq_s32_f32(n.of[i]), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
    float32x4_t first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    float32x4_t second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
    return vmulq_f32(vmulq_f32(p.of[i], first), second);
  });
}
static inline Floats ordinary_power(Floats x, Floats power) {
  return of_each<Floats>([&](int i) {
    float32x4_t kept = vbslq_f32(vcltq_f32(x.of[i], vdupq_n_f32(-103.0f)), vdupq_n_f32(0), power.of[i]);
    return vbslq_f32(vceqq_f32(x.of[i], x.of[i]), kept, x.of[i]);
  });
}

static inline float sum_of(Floats x) {
  float32x4_t four = vaddq_f32(vaddq_f32(x.of[3], x.of[1]), vaddq_f32(x.of[2], x.of[0]));
  float32x2_t two = vadd_f32(vget_high_f32(four), vget_low_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float largest_of(Floats x) {
  float32x4_t four = larger4(larger4(x.of[3], x.of[1]), larger4(x.of[2], x.of[0]));
  return vmaxvq_f32(four);
}
static inline uint32_t lanes_of(uint32x4_t set) {
  const uint32x4_t places = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(set, places));
}
static inline uint32_t equal_lanes(Floats a, Floats b) {
  uint32_t lanes = 0;
  for (int i = 0; i < 4; i++) lanes |= lanes_of(vceqq_f32(a.of[i], b.of[i])) << 4 * i;
  return lanes;
}
static inline uint32_t nan_lanes(Floats x) { return equal_lanes(x, x) ^ 0xffff; }

static inline Ints magnitude_bits(Floats x) {
  return of_each<Ints>([&](int i) { return vandq_s32(vreinterpretq_s32_f32(x.of[i]), vdupq_n_s32(0x7fffffff)); });
}
static inline Ints larger_ints(Ints a, Ints b) { return of_each<Ints>([&](int i) { return vmaxq_s32(a.of[i], b.of[i]); }); }
static inline Ints add_ints(Ints a, Ints b) { return of_each<Ints>([&](int i) { return vaddq_s32(a.of[i], b.of[i]); }); }
static inline int32_t largest_of_ints(Ints x) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.of[0], x.of[1]), vmaxq_s32(x.of[2], x.of[3])));
}
static inline int32_t sum_of_ints(Ints x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.of[0], x.of[1]), vaddq_s32(x.of[2], x.of[3])));
}
static inline Ints nearest_ints(Floats x) { return of_each<Ints>([&](int i) { return vcvtnq_s32_f32(x.of[i]); }); }
static inline Floats floats_of(Ints x) { return of_each<Floats>([&](int i) { return vcvtq_f32_s32(x.of[i]); }); }
static inline void store_bytes(int8_t* at, Ints x) {
  int16x8_t low = vcombine_s16(vqmovn_s32(x.of[0]), vqmovn_s32(x.of[1]));
  int16x8_t high = vcombine_s16(vqmovn_s32(x.of[2]), vqmovn_s32(x.of[3]));
  vst1q_s8(at, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

static inline void store_int16(int16_t* at, Ints first, Ints second) {
  for (int i = 0; i < 4; i++) {
    int16x4_t a = vqmovn_s32(first.of[i]), b = vqmovn_s32(second.of[i]);
    vst1q_s16(at + 8 * i, vcombine_s16(vuzp1_s16(a, b), vuzp2_s16(a, b)));
  }
}

static inline Ints load_ints(const uint8_t* at) {
  return of_each<Ints>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(at + 16 * i)); });
}
static inline Ints and_ints(Ints a, Ints b) { return of_each<Ints>([&](int i) { return vandq_s32(a.of[i], b.of[i]); }); }
static inline Ints or_ints(Ints a, Ints b) { return of_each<Ints>([&](int i) { return vorrq_s32(a.of[i], b.of[i]); }); }
template <int BITS>
static inline Ints right(Ints x) {
  return of_each<Ints>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.of[i]), BITS)); });
}
template <int BITS>
static inline Ints left(Ints x) {
  return of_each<Ints>([&](int i) { return vshlq_n_s32(x.of[i], BITS); });
}
static inline Ints load_bytes(const uint8_t* at) {
  uint8x16_t bytes = vld1q_u8(at);
  uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
static inline Ints load_bytes(const int8_t* at) {
  int8x16_t bytes = vld1q_s8(at);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}

static inline uint16_t half_of(float x) {
  __fp16 half = (__fp16)x;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
static inline float float_of_half(uint16_t x) {
  __fp16 half;
  std::memcpy(&half, &x, 2);
  return (float)half;
}

static inline void transpose4(float32x4_t rows[4]) {
  float32x4x2_t low = vtrnq_f32(rows[0], rows[1]), high = vtrnq_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
  rows[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
  rows[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
  rows[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}

static inline void transpose16(Floats rows[16]) {
  Floats transposed[16];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      float32x4_t four[4];
      for (int r = 0; r < 4; r++) four[r] = rows[4 * i + r].of[j];
      transpose4(four);
      for (int r = 0; r < 4; r++) transposed[4 * j + r].of[i] = four[r];
    }
  std::memcpy(rows, transposed, sizeof transposed);
}

using Fours = int8x16_t;
static inline Fours fours_of(const int8_t* at) {
  int32_t value;
  std::memcpy(&value, at, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(value));
}

static inline Ints add_pairs(Ints sums, Ints codes, Fours inputs) {
  const int16x8_t two = vreinterpretq_s16_s8(inputs);
  return of_each<Ints>([&](int i) {
    int16x8_t of = vreinterpretq_s16_s32(codes.of[i]);
    int32x4_t low = vmull_s16(vget_low_s16(of), vget_low_s16(two)), high = vmull_high_s16(of, two);
    return vaddq_s32(sums.of[i], vpaddq_s32(low, high));
  });
}

struct ByteWeights {
  int8x16_t of[4];
};
static inline ByteWeights byte_weights_of(Ints x) {
  return of_each<ByteWeights>([&](int i) { return vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(x.of[i]), vdupq_n_u8(128))); });
}
static inline ByteWeights byte_weights(const uint8_t* at) { return byte_weights_of(load_ints(at)); }
struct ByteSums {
  Ints sums;
  // Weights are converted to signed bytes, so there is no offset.
  explicit ByteSums(int32_t) : sums(all_ints(0)) {}
  ByteSums() = default;
  void add(const ByteWeights& weights, Fours inputs) {
    for (int i = 0; i < 4; i++) sums.of[i] = vdotq_s32(sums.of[i], weights.of[i], inputs);
  }
  Ints total() const { return sums; }
};

struct NibbleWeights {
  int8x16_t first[4], second[4];
};
static inline NibbleWeights nibble_weights(const uint8_t* at) {
  NibbleWeights weights;
  for (int i = 0; i < 4; i++) {
    uint8x16_t both = vld1q_u8(at + 16 * i);
    weights.first[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    weights.second[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  }
  return weights;
}
struct NibbleSums {
  Ints sums = all_ints(0);
  void add(const NibbleWeights& weights, Fours first, Fours second) {
    for (int i = 0; i < 4; i++) {
      sums.of[i] = vdotq_s32(sums.of[i], weights.first[i], first);
      sums.of[i] = vdotq_s32(sums.of[i], weights.second[i], second);
    }
  }
  Ints total() const { return sums; }
};
