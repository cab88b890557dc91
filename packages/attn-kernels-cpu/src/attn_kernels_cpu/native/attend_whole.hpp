// Softmax attention over whole sequences and its gradients, with the scores of some neighbouring queries at a time,
// which are recomputed for the gradients. Queries are aligned to the last keys.
#pragma once
#include <omp.h>

#include <cmath>

#include "dropout.hpp"
#include "gemm.hpp"

// A tensor [batch, tokens, heads, size], contiguous along its last axis, and its strides.
struct Heads4 {
  float* at;
  int64_t batch, token, head;

  Matrix matrix(int b, int h, int first) const { return {at + b * batch + h * head + first * token, token, 1}; }
  Matrix transposed(int b, int h, int first) const { return {at + b * batch + h * head + first * token, 1, token}; }
  Product product(int b, int h, int first, bool add) const {
    return {at + b * batch + h * head + first * token, token, nullptr, add};
  }
};

// The argument of attention; `logs` [batch, heads, queries] is the log-sum-exp of each query, `dropout` null for none.
struct WholeAttention {
  Heads4 query, key, value, out;
  float* logs;
  int32_t batch, heads, shared_heads, queries, keys, key_size, value_size, causal;
  float scale;
  int32_t threads;
  const Dropout* dropout;

  int seen(int query) const { return causal ? std::max(0, std::min(keys, query + 1 + keys - queries)) : keys; }
};

// The gradient of the output, `change`, and those of queries, keys and values, which are written.
struct WholeAttentionChange {
  Heads4 change, query, key, value;
};

constexpr int QUERIES_TOGETHER = 64;  // queries whose scores are computed together

struct WholeAttentionRoom {
  std::vector<float> scores, changes, factors;
  void resize(int keys) {
    scores.resize((size_t)QUERIES_TOGETHER * keys);
    changes.resize((size_t)QUERIES_TOGETHER * keys);
    factors.resize((size_t)keys + COUNTERS_TOGETHER * KEYS_OF_A_COUNTER);
  }
};

// scores[i] = e^(scale * scores[i] - log) for the first `seen`, and 0 behind them up to `count`; returns their sum.
static float weigh(float* scores, int seen, int count, float scale, float log) {
  Floats total = all(0.0f);
  for (int j = 0; j < seen; j += 16) {
    const int here = std::min(16, seen - j);
    Floats weights = exp16(fmadd(load_lanes(scores + j, here), all(scale), all(-log)));
    store_some(scores + j, here, weights);
    total = total + load_lanes(scores + j, here);
  }
  for (int j = seen; j < count; j++) scores[j] = 0.0f;
  return sum_of(total);
}

static float largest_score(const float* scores, int seen) {
  float largest = -std::numeric_limits<float>::infinity();
  int j = 0;
  if (seen >= 16) {
    Floats top = load16(scores);
    for (j = 16; j + 16 <= seen; j += 16) top = larger(top, load16(scores + j));
    largest = largest_of(top);
  }
  for (; j < seen; j++) largest = std::max(largest, scores[j]);
  return largest;
}

// The dropout factors of a query's first `seen` weights.
static const float* factors_of(const WholeAttention& a, int b, int h, int query, int seen, WholeAttentionRoom& room) {
  const uint32_t row = (a.dropout->first + (uint32_t)b) * (uint32_t)a.heads + (uint32_t)h;
  dropout_factors(*a.dropout, row, query, seen, room.factors.data());
  return room.factors.data();
}

static void multiply_by(const float* factors, int count, float* to) {
  for (int j = 0; j < count; j += 16) {
    const int here = std::min(16, count - j);
    store_some(to + j, here, load_lanes(to + j, here) * load_lanes(factors + j, here));
  }
}

static void attention_of_head(const WholeAttention& a, int b, int h, WholeAttentionRoom& room) {
  const int s = h / (a.heads / a.shared_heads);
  float inverse[QUERIES_TOGETHER];
  for (int q = 0; q < a.queries; q += QUERIES_TOGETHER) {
    const int here = std::min(QUERIES_TOGETHER, a.queries - q), keys = a.seen(q + here - 1);
    float* scores = room.scores.data();
    gemm(a.query.matrix(b, h, q), a.key.transposed(b, s, 0), here, keys, a.key_size, {scores, keys, nullptr, false});
    for (int i = 0; i < here; i++) {
      const int seen = a.seen(q + i);
      float* row = scores + (int64_t)i * keys;
      const float top = seen ? largest_score(row, seen) * a.scale : 0.0f, sum = weigh(row, seen, keys, a.scale, top);
      inverse[i] = sum > 0 ? 1.0f / sum : (sum == 0 ? 0.0f : sum);
      a.logs[((int64_t)b * a.heads + h) * a.queries + q + i] = top + std::log(sum);
      if (a.dropout) multiply_by(factors_of(a, b, h, q + i, seen, room), seen, row);
    }
    const Product out = a.out.product(b, h, q, false);
    gemm({scores, keys, 1}, a.value.matrix(b, s, 0), here, a.value_size, keys, out);
    for (int i = 0; i < here; i++)
      for (int d = 0; d < a.value_size; d++) out.at[i * out.stride + d] *= inverse[i];
  }
}

static void attention(const WholeAttention& a) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    WholeAttentionRoom room;
    room.resize(a.keys);
#pragma omp for schedule(static)
    for (int task = 0; task < a.batch * a.heads; task++) attention_of_head(a, task / a.heads, task % a.heads, room);
  }
}

// The gradient of scores: change[j] = weights[j] * (change[j] - Σ weights * change) * scale. The sum is computed as the
// product of the query's output `out` and its gradient `out_change`.
static void score_changes(const float* weights, const float* out_change, const float* out, const WholeAttention& a, int keys,
                          float* change) {
  Floats dots = all(0.0f);
  for (int d = 0; d < a.value_size; d += 16) {
    const int some = std::min(16, a.value_size - d);
    dots = fmadd(load_lanes(out_change + d, some), load_lanes(out + d, some), dots);
  }
  const Floats mean = all(sum_of(dots)), scale = all(a.scale);
  for (int j = 0; j < keys; j += 16) {
    const int some = std::min(16, keys - j);
    store_some(change + j, some, load_lanes(weights + j, some) * (load_lanes(change + j, some) - mean) * scale);
  }
}

static void attention_changes_of_head(const WholeAttention& a, const WholeAttentionChange& c, int b, int h,
                                      WholeAttentionRoom& room) {
  const int s = h / (a.heads / a.shared_heads);
  for (int q = 0; q < a.queries; q += QUERIES_TOGETHER) {
    const int here = std::min(QUERIES_TOGETHER, a.queries - q), keys = a.seen(q + here - 1);
    float *scores = room.scores.data(), *changes = room.changes.data();
    const Matrix queries = a.query.matrix(b, h, q), out_change = c.change.matrix(b, h, q), out = a.out.matrix(b, h, q);
    gemm(queries, a.key.transposed(b, s, 0), here, keys, a.key_size, {scores, keys, nullptr, false});
    gemm(out_change, a.value.transposed(b, s, 0), here, keys, a.value_size, {changes, keys, nullptr, false});
    for (int i = 0; i < here; i++) {
      const int seen = a.seen(q + i);
      float *row = scores + (int64_t)i * keys, *change = changes + (int64_t)i * keys;
      weigh(row, seen, keys, a.scale, seen ? a.logs[((int64_t)b * a.heads + h) * a.queries + q + i] : 0.0f);
      const float* factors = a.dropout ? factors_of(a, b, h, q + i, seen, room) : nullptr;
      if (factors) multiply_by(factors, seen, change);
      score_changes(row, out_change.at + i * out_change.row, out.at + i * out.row, a, keys, change);
      // Values are multiplied by the weights after dropout.
      if (factors) multiply_by(factors, seen, row);
    }
    gemm({scores, 1, keys}, out_change, keys, a.value_size, here, c.value.product(b, s, 0, true));
    gemm({changes, 1, keys}, queries, keys, a.key_size, here, c.key.product(b, s, 0, true));
    gemm({changes, keys, 1}, a.key.matrix(b, s, 0), here, a.key_size, keys, c.query.product(b, h, q, false));
  }
}

// All gradients. Those of keys and values are accumulated, so the caller must initialize them with zeros.
static void attention_changes(const WholeAttention& a, const WholeAttentionChange& c) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    WholeAttentionRoom room;
    room.resize(a.keys);
#pragma omp for schedule(static)
    for (int task = 0; task < a.batch * a.shared_heads; task++) {
      const int b = task / a.shared_heads, s = task % a.shared_heads, group = a.heads / a.shared_heads;
      for (int h = s * group; h < (s + 1) * group; h++) attention_changes_of_head(a, c, b, h, room);
    }
  }
}
