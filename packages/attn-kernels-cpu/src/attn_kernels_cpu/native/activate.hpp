// Activations of feed-forward layers for training, and their gradients.
#pragma once
#include <omp.h>

#include <algorithm>

#include "gemm.hpp"

// An activation and its derivative at the same x; the compiler removes the one that is not used.
struct ValueAndSlope {
  Floats value, slope;
};

// x clamped to ±20, beyond which all of these activations are linear in float32; NaN stays NaN.
static inline Floats clamped(Floats x) { return smaller(all(20.0f), larger(all(-20.0f), x)); }

// x / (1 + e^-x).
struct Silu {
  static ValueAndSlope at(Floats x) {
    Floats power = exp16(all(0.0f) - x), share = all(1.0f) / (all(1.0f) + power);
    Floats above = larger(all(-200.0f), x);
    return {above * share, fmadd(smaller(all(200.0f), above), power * share * share, share)};
  }
};

// x Φ(x), with the normal distribution Φ by the erfc of Abramowitz and Stegun, 7.1.26, whose error is below 1.5e-7.
struct Gelu {
  static ValueAndSlope at(Floats x) {
    Floats near = clamped(x), size = larger(near, all(0.0f) - near), z = size * all(0.70710678f);
    Floats power = exp16(all(0.0f) - z * z), t = all(1.0f) / fmadd(z, all(0.3275911f), all(1.0f));
    Floats p = fmadd(t, all(1.061405429f), all(-1.453152027f));
    p = fmadd(p, t, all(1.421413741f));
    p = fmadd(p, t, all(-0.284496736f));
    p = fmadd(p, t, all(0.254829592f));
    Floats beyond = p * t * power * all(0.5f);
    // Φ(x) is `beyond` for x below 0, and 1 - `beyond` above.
    Floats sign = smaller(all(1.0f), larger(all(-1.0f), x * all(1e30f)));
    Floats share = fmadd(sign, all(0.5f) - beyond, all(0.5f));
    return {larger(all(0.0f), x) - size * beyond, fmadd(near * all(0.39894228f), power, share)};
  }
};

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 = x / (1 + e^-2u).
struct GeluTanh {
  static ValueAndSlope at(Floats x) {
    const float a = 1.5957691216f, b = 0.0713548163f;
    Floats near = clamped(x), square = near * near, twice = near * fmadd(square, all(b), all(a));
    Floats power = exp16(all(0.0f) - twice), share = all(1.0f) / (all(1.0f) + power);
    Floats change = power * share * share * fmadd(square, all(3.0f * b), all(a));
    return {larger(all(-20.0f), x) * share, fmadd(near, change, share)};
  }
};

constexpr int64_t CHUNK = 4096;  // elements that a thread takes at a time

template <class Take>
static void each_sixteen(int64_t count, int threads, Take take) {
  const int64_t chunks = (count + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && chunks > 1)
  for (int64_t s = 0; s < chunks; s++)
    for (int64_t i = s * CHUNK; i < std::min(count, (s + 1) * CHUNK); i += 16)
      take(i, (int)std::min<int64_t>(16, count - i));
}

template <class F>
static void activate(const float* x, const float* change, float* out, int64_t count, int threads) {
  if (change == nullptr)
    return each_sixteen(count, threads, [=](int64_t i, int here) {
      store_some(out + i, here, F::at(load_lanes(x + i, here)).value);
    });
  each_sixteen(count, threads, [=](int64_t i, int here) {
    store_some(out + i, here, F::at(load_lanes(x + i, here)).slope * load_lanes(change + i, here));
  });
}

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

// Calls `run` with the activation of a form.
template <class Run>
static inline void with_activation(int form, Run run) {
  if (form == SILU) return run(Silu());
  if (form == GELU) return run(Gelu());
  run(GeluTanh());
}

// out = f(x), or f'(x) * change if `change` is given.
static void activate(int form, const float* x, const float* change, float* out, int64_t count, int threads) {
  with_activation(form, [=](auto f) { activate<decltype(f)>(x, change, out, count, threads); });
}
