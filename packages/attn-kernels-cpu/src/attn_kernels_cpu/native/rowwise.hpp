// RMSNorm, gates, rotary positions and cross-entropy for training, and their gradients, in one pass over memory each.
#pragma once
#include "activate.hpp"
#include "activations.hpp"
#include "attend_whole.hpp"

// Rows [count, width]; `added` (or null) is added to them first, and their sum written to `total`.
struct Norm {
  const float *rows, *added, *gain;
  float *total, *out;
  int64_t count;
  int32_t width;
  float eps;
  int32_t threads;
};

static void norm_rows(const Norm& n) {
#pragma omp parallel for schedule(static) num_threads(n.threads) if (n.threads > 1)
  for (int64_t r = 0; r < n.count; r++) {
    const float* x = n.rows + r * n.width;
    if (n.added) {
      float* sum = n.total + r * n.width;
      for (int i = 0; i < n.width; i += 16) {
        const int here = n.width - i;
        store_some(sum + i, here, load_lanes(x + i, here) + load_lanes(n.added + r * n.width + i, here));
      }
      x = sum;
    }
    rms_norm_row(x, n.width, n.gain, n.eps, n.out + r * n.width);
  }
}

constexpr int ROWS_OF_A_GAIN = 64;  // rows whose gradients of the gain are summed together

// The gradients of normalised rows, `change`, and of the gain, `gains` [count / 64, width] (or null), from those of the
// result, `out`, and of the sum that was normalised, `total` (or null). `gains` must be zeros.
struct NormChange {
  const float *rows, *gain, *out, *total;
  float *change, *gains;
  int64_t count;
  int32_t width;
  float eps;
  int32_t threads;
};

static void change_of_row(const NormChange& n, int64_t r) {
  const int64_t at = r * n.width;
  const float *x = n.rows + at, *out = n.out + at;
  Floats squares = all(0.0f), dots = all(0.0f);
  for (int i = 0; i < n.width; i += 16) {
    const int here = n.width - i;
    const Floats v = load_lanes(x + i, here);
    squares = fmadd(v, v, squares);
    dots = fmadd(v, load_lanes(out + i, here) * load_lanes(n.gain + i, here), dots);
  }
  const float factor = 1.0f / std::sqrt(sum_of(squares) / (float)n.width + n.eps);
  const Floats f = all(factor), along = all(sum_of(dots) * factor * factor * factor / (float)n.width);
  float* gains = n.gains ? n.gains + r / ROWS_OF_A_GAIN * n.width : nullptr;
  for (int i = 0; i < n.width; i += 16) {
    const int here = n.width - i;
    const Floats v = load_lanes(x + i, here), g = load_lanes(out + i, here) * f;
    Floats change = fnmadd(along, v, g * load_lanes(n.gain + i, here));
    if (n.total) change = change + load_lanes(n.total + at + i, here);
    store_some(n.change + at + i, here, change);
    if (gains) store_some(gains + i, here, fmadd(g, v, load_lanes(gains + i, here)));
  }
}

static void norm_changes(const NormChange& n) {
  const int64_t parts = (n.count + ROWS_OF_A_GAIN - 1) / ROWS_OF_A_GAIN;
#pragma omp parallel for schedule(static) num_threads(n.threads) if (n.threads > 1)
  for (int64_t p = 0; p < parts; p++)
    for (int64_t r = p * ROWS_OF_A_GAIN; r < std::min(n.count, (p + 1) * ROWS_OF_A_GAIN); r++) change_of_row(n, r);
}

// out = f(gate) * up; with `change`, the gradient of the output, those of `gate` and `up`, `out` and `to_up`.
struct Gate {
  const float *gate, *up, *change;
  float *out, *to_up;
  int64_t count;
  int32_t threads;
};

template <class F>
static void gate_rows(const Gate& g) {
  if (!g.change)
    return each_sixteen(g.count, g.threads, [=](int64_t i, int here) {
      store_some(g.out + i, here, F::at(load_lanes(g.gate + i, here)).value * load_lanes(g.up + i, here));
    });
  each_sixteen(g.count, g.threads, [=](int64_t i, int here) {
    const ValueAndSlope f = F::at(load_lanes(g.gate + i, here));
    const Floats change = load_lanes(g.change + i, here);
    store_some(g.out + i, here, f.slope * load_lanes(g.up + i, here) * change);
    store_some(g.to_up + i, here, f.value * change);
  });
}

static void gate_rows(int form, const Gate& g) {
  with_activation(form, [&](auto f) { gate_rows<decltype(f)>(g); });
}

// Rows [tokens, heads, size], of which element i of the first half of `turned` elements is paired with element i of the
// second. Token t has the cosines and sines of row t modulo `angles`, [angles, turned]. Sines are multiplied by `sign`.
struct Turn {
  const float *rows, *cosines, *sines;
  float* out;
  int64_t tokens, angles;
  int32_t heads, size, turned;
  float sign;
  int32_t threads;
};

static void turn_rows(const Turn& t) {
  const int half = t.turned / 2;
#pragma omp parallel for schedule(static) num_threads(t.threads) if (t.threads > 1)
  for (int64_t token = 0; token < t.tokens; token++) {
    const float *c = t.cosines + token % t.angles * t.turned, *s = t.sines + token % t.angles * t.turned;
    for (int64_t head = token * t.heads; head < (token + 1) * t.heads; head++) {
      const float* x = t.rows + head * t.size;
      float* out = t.out + head * t.size;
      for (int i = 0; i < half; i += 16) {
        const int here = half - i, j = i + half;
        const Floats a = load_lanes(x + i, here), b = load_lanes(x + j, here), sign = all(t.sign);
        store_some(out + i, here, fmadd(a, load_lanes(c + i, here), b * load_lanes(s + i, here) * sign));
        store_some(out + j, here, fmadd(b, load_lanes(c + j, here), a * load_lanes(s + j, here) * sign));
      }
      std::copy(x + t.turned, x + t.size, out + t.turned);
    }
  }
}

// The cross-entropies of `ids` under logits [count, vocabulary], which are overwritten: by the gradients of each row's
// loss if `gradients`. Those of ids that are `ignored` are 0.
struct Losses {
  float* logits;
  const int64_t* ids;
  float* losses;
  int64_t count, ignored;
  int32_t vocabulary, gradients, threads;
};

static void judge_rows(const Losses& l) {
#pragma omp parallel for schedule(static) num_threads(l.threads) if (l.threads > 1)
  for (int64_t r = 0; r < l.count; r++) {
    const int64_t id = l.ids[r];
    float* x = l.logits + r * l.vocabulary;
    if (id == l.ignored) {
      l.losses[r] = 0.0f;
      if (l.gradients) std::fill(x, x + l.vocabulary, 0.0f);
      continue;
    }
    const bool known = id >= 0 && id < l.vocabulary;
    const float own = known ? x[id] : std::numeric_limits<float>::quiet_NaN(), top = largest_score(x, l.vocabulary);
    const float sum = weigh(x, l.vocabulary, l.vocabulary, 1.0f, top);
    l.losses[r] = std::log(sum) + (top - own);
    if (!l.gradients) continue;
    const Floats share = all(known ? 1.0f / sum : own);
    for (int i = 0; i < l.vocabulary; i += 16) {
      const int here = l.vocabulary - i;
      store_some(x + i, here, load_lanes(x + i, here) * share);
    }
    if (known) x[id] -= 1.0f;
  }
}
