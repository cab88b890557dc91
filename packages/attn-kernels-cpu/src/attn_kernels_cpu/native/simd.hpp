// Vectors of sixteen numbers on every CPU: one of the headers below defines `Floats`, `Ints` and byte products for its
// instruction set, and everything else is written once over these. Every lane goes through the same operations in the
// same order on every CPU, fused multiply-adds and sums of lanes included, so that all give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

enum Format : int32_t {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  INT8 = 2,
  INT4 = 3,  // GGUF's Q4_1
  BFLOAT16_PAIRS = 4,
  INT8_FOURS = 5,
  Q8_0 = 6,
  Q4_0 = 7,
  Q4_K = 8,
  Q6_K = 9,
  INT4_ZEROS = 10,  // that of GPTQ and AWQ: a step and a zero point
  JOINED = 11,      // several layers, in any formats, whose outputs are concatenated
  FLOAT16 = 12      // of cached rows
};

#if defined(__AVX512VNNI__)
#include "simd_avx512.hpp"
#elif defined(__AVX2__)
#include "simd_avx2.hpp"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.hpp"
#else
#error "no vectors of this chip are known: AVX-512 with VNNI, AVX2 with FMA and F16C, or NEON with dot products"
#endif

static inline Floats load16(const int8_t* at) { return floats_of(load_bytes(at)); }

// A float16; an uint16_t is a bfloat16.
struct Half {
  uint16_t bits;
};
static inline Floats load16(const Half* at) { return load_halves(&at->bits); }
static inline void store16(Half* at, Floats values) {
  float lanes[16];
  store16(lanes, values);
  for (int i = 0; i < 16; i++) at[i].bits = half_of(lanes[i]);
}

// e^x, accurate to 2 units in the last place; 0 for -inf, and NaN stays NaN.
static inline Floats exp16(Floats x) {
  Floats y = smaller(larger(x, all(-126.0f)), all(88.7f));
  Floats n = rounded(y * all(1.44269504f));
  Floats r = fnmadd(n, all(0.693359375f), y);
  r = fnmadd(n, all(-2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fmadd(p, r, all(1.3981999507e-3f));
  p = fmadd(p, r, all(8.3334519073e-3f));
  p = fmadd(p, r, all(4.1665795894e-2f));
  p = fmadd(p, r, all(1.6666665459e-1f));
  p = fmadd(p, r, all(5.0000001201e-1f));
  p = fmadd(p, r * r, r + all(1.0f));
  return ordinary_power(x, times_power_of_two(p, n));
}
