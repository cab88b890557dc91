// Sampling of the next token of each row of logits, and log probabilities. For the rules, and for the reason why every
// sum is exact, see attn_core/kernels/sampling.py: weights are integers, so tokens are the same as those of
// attn_engine/sampler.py.
#pragma once
#include <algorithm>
#include <vector>

#include "largest.hpp"

constexpr int WEIGHT_BITS = 32, SUM_BLOCK = 256;
constexpr double ONE_WEIGHT = 4294967296.0;  // 2^WEIGHT_BITS
constexpr float LEAST_EXPONENT = -30.0f;     // the weight of e to this power rounds to zero

// The sampling parameters of a row; an `inverse` temperature of 0 takes the most likely token. Pointers may be null.
struct Draw {
  const int64_t* occurred;
  const uint8_t* allowed;
  const float *counts, *bias;
  const int64_t* biased;
  double point, top_p, min_p;
  float inverse, repetition, frequency, presence;
  int32_t top_k, biases, occurrences;
};

// A score and its token, ordered by descending score, equal scores by token.
struct Ranked {
  float score;
  int32_t token;
  bool operator<(const Ranked& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

struct DrawRoom {
  std::vector<float> processed, scores, weights;
  std::vector<double> blocks;
  std::vector<Ranked> ranked;
};

// round(2^32 e^x) for x <= 0, without fused multiply-adds, which NumPy does not have.
static inline Floats whole_weights(Floats x) {
  const Floats y = larger(x, all(LEAST_EXPONENT));
  const Floats n = rounded(y * all(1.44269504f));
  Floats r = y - n * all(0.693359375f);
  r = r - n * all(-2.12194440e-4f);
  Floats p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  p = p * (r * r) + (r + all(1.0f));
  return rounded(times_power_of_two(p, n + all((float)WEIGHT_BITS)));
}

// The weights of `count` scores; `weights` must have room for a multiple of sixteen.
static inline void weigh(const float* scores, int count, float highest, float inverse, float* weights) {
  const Floats top = all(highest), factor = all(inverse), none = all(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < count; i += 16)
    store16(weights + i, whole_weights((load_some(scores + i, count - i, none) - top) * factor));
}

// The sum of integers below 2^32, which is exact for up to 2^21 of them, in any order.
static inline double exact_sum(const float* weights, int count) {
  double sums[16] = {};
  int i = 0;
  for (; i + 16 <= count; i += 16)
    for (int lane = 0; lane < 16; lane++) sums[lane] += weights[i + lane];
  for (; i < count; i++) sums[0] += weights[i];
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

// Applies penalties, biases and constraints, in this order.
static inline void process_scores(const float* logits, int size, const Draw& d, float* out) {
  std::memcpy(out, logits, sizeof(float) * size);
  for (int i = 0; i < d.occurrences; i++) {
    // An embedding may have more rows than there are logits: such tokens have no score.
    if ((uint64_t)d.occurred[i] >= (uint64_t)size) continue;
    float& score = out[d.occurred[i]];
    if (d.repetition != 1.0f) score = score > 0 ? score / d.repetition : score * d.repetition;
    score = score - d.frequency * d.counts[i] - (d.counts[i] > 0 ? d.presence : 0.0f);
  }
  for (int i = 0; i < d.biases; i++) out[d.biased[i]] += d.bias[i];
  if (d.allowed)
    for (int i = 0; i < size; i++) out[i] = d.allowed[i] ? out[i] : -std::numeric_limits<float>::infinity();
}

// Collects the tokens with at least this score, in order of their ids.
static inline void gather(const float* scores, int size, float least, std::vector<Ranked>& found) {
  found.clear();
  const Floats bound = all(least), none = all(std::numeric_limits<float>::quiet_NaN());
  for (int i = 0; i < size; i += 16) {
    const Floats here = load_some(scores + i, size - i, none);
    for (uint32_t lanes = equal_lanes(larger(bound, here), here); lanes; lanes &= lanes - 1) {
      const int token = i + __builtin_ctz(lanes);
      found.push_back({scores[token], token});
    }
  }
}

// Distances below the highest score, in units, at which `rank` tries to stop before it considers all tokens.
constexpr float REACHES[] = {1, 2, 4, 7, 11, 16, std::numeric_limits<float>::infinity()};

// Collects the tokens with the highest scores, at growing distances from the highest, until `enough(found)`; not
// sorted.
template <class Enough>
static inline void rank(const float* scores, int size, float highest, float unit, std::vector<Ranked>& found, Enough enough) {
  for (float reach : REACHES) {
    const float least = highest - reach * unit;
    gather(scores, size, std::isnan(least) ? -std::numeric_limits<float>::infinity() : least, found);
    if ((int)found.size() == size || enough(found)) break;
  }
}

static inline void sort_first(std::vector<Ranked>& found, size_t count) {
  if (count < found.size()) {
    std::nth_element(found.begin(), found.begin() + count, found.end());
    found.resize(count);
  }
  std::sort(found.begin(), found.end());
}

// Computes the weights of the ranked tokens in `room.weights`, which overwrites those of all tokens.
static inline void weigh_ranked(DrawRoom& room, float highest, float inverse) {
  const int count = (int)room.ranked.size();
  room.scores.resize(std::max(room.scores.size(), (size_t)count + 16));
  room.weights.resize(std::max(room.weights.size(), (size_t)count + 16));
  for (int i = 0; i < count; i++) room.scores[i] = room.ranked[i].score;
  weigh(room.scores.data(), count, highest, inverse, room.weights.data());
}

// The first index whose cumulative sum exceeds `target`, else the last one with a weight: rounding can put the target
// past the total.
static inline int place_of(const float* weights, int count, double before, double target) {
  int last = 0;
  for (int i = 0; i < count; i++) {
    before += weights[i];
    if (before > target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}

static inline int64_t draw_ranked(const float* scores, int size, float highest, const Draw& d, DrawRoom& room) {
  const size_t most = d.top_k > 0 ? std::min(d.top_k, size) : size;
  const float unit = 1.0f / d.inverse;
  double mass = 0;
  if (d.top_k > 0) {
    rank(scores, size, highest, unit, room.ranked, [&](auto& found) { return found.size() >= most; });
    sort_first(room.ranked, most);
    weigh_ranked(room, highest, d.inverse);
    mass = exact_sum(room.weights.data(), (int)room.ranked.size());
  } else {
    mass = exact_sum(room.weights.data(), size);
    rank(scores, size, highest, unit, room.ranked, [&](auto& found) {
      double sum = 0;
      for (const Ranked& one : found) sum += room.weights[one.token];
      return sum >= d.top_p * mass;
    });
    sort_first(room.ranked, most);
    weigh_ranked(room, highest, d.inverse);
  }
  float* weights = room.weights.data();
  int count = (int)room.ranked.size();
  if (d.top_p < 1) {
    double before = weights[0];
    int kept = 1;
    for (; kept < count && before < d.top_p * mass; kept++) before += weights[kept];
    count = kept;
  }
  const float least = (float)(d.min_p * ONE_WEIGHT);
  for (int i = 0; i < count; i++)
    if (weights[i] < least) weights[i] = 0;
  return room.ranked[place_of(weights, count, 0, d.point * exact_sum(weights, count))].token;
}

static inline int64_t draw_weighted(int size, const Draw& d, DrawRoom& room) {
  float* weights = room.weights.data();
  const float least = (float)(d.min_p * ONE_WEIGHT);
  if (least > 0)
    for (int i = 0; i < size; i++) weights[i] = weights[i] < least ? 0.0f : weights[i];
  room.blocks.clear();
  double total = 0;
  for (int first = 0; first < size; first += SUM_BLOCK) {
    room.blocks.push_back(exact_sum(weights + first, std::min(SUM_BLOCK, size - first)));
    total += room.blocks.back();
  }
  const double target = d.point * total;
  double before = 0;
  size_t block = 0, last = 0;
  for (; block < room.blocks.size() && before + room.blocks[block] <= target; block++) {
    before += room.blocks[block];
    if (room.blocks[block] > 0) last = block;
  }
  if (block == room.blocks.size()) before = total - room.blocks[block = last];
  const int first = (int)block * SUM_BLOCK;
  return first + place_of(weights + first, std::min(SUM_BLOCK, size - first), before, target);
}

// The token of a row; -1 if the largest score is not finite or a score is NaN.
static inline int64_t draw_token(const float* logits, int size, const Draw& d, DrawRoom& room) {
  const float* scores = logits;
  if (d.occurrences || d.allowed || d.biases) {
    room.processed.resize(std::max(room.processed.size(), (size_t)size));
    process_scores(logits, size, d, room.processed.data());
    scores = room.processed.data();
  }
  Leader leader;
  leader.update(scores, size, 0);
  int64_t token = leader.finite_place();
  if (token >= 0 && d.inverse > 0) {
    const bool ranked = d.top_k > 0 || d.top_p < 1;
    if (!ranked || d.top_k <= 0) {
      room.weights.resize(std::max(room.weights.size(), (size_t)size + 16));
      weigh(scores, size, leader.value, d.inverse, room.weights.data());
    }
    token = ranked ? draw_ranked(scores, size, leader.value, d, room) : draw_weighted(size, d, room);
  }
  return token;
}

static void draw_tokens(const float* logits, int rows, int size, const Draw* draws, int64_t* tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && rows > 1)
  for (int r = 0; r < rows; r++) {
    static thread_local DrawRoom room;
    tokens[r] = draw_token(logits + (size_t)r * size, size, draws[r], room);
  }
}

// log(sum(e^logits)) of a row whose largest is `top`.
static inline double log_total(const float* logits, int size, float top) {
  const Floats highest = all(top), none = all(-std::numeric_limits<float>::infinity());
  double sums[16] = {}, total = 0;
  for (int i = 0; i < size; i += 16) {
    float weights[16];
    store16(weights, exp16(load_some(logits + i, size - i, none) - highest));
    for (int lane = 0; lane < 16; lane++) sums[lane] += weights[lane];
  }
  for (double sum : sums) total += sum;
  return std::log(total) + top;
}

static void log_softmax_rows(const float* logits, int64_t rows, int size, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    const float* row = logits + r * size;
    Leader leader;
    leader.update(row, size, 0);
    const double whole = log_total(row, size, leader.value);
    for (int i = 0; i < size; i++) out[r * size + i] = (float)(row[i] - whole);
  }
}

// log(softmax(logits)) of one token, and of the `top` most likely tokens, in descending order.
static inline void logprobs_of(const float* logits, int size, int64_t token, int top, DrawRoom& room, float* own,
                               int64_t* ids, float* values) {
  Leader leader;
  leader.update(logits, size, 0);
  const double whole = log_total(logits, size, leader.value);
  *own = (float)(logits[token] - whole);
  if (top <= 0) return;
  rank(logits, size, leader.value, 1.0f, room.ranked, [&](auto& found) { return (int)found.size() >= top; });
  sort_first(room.ranked, top);
  for (int i = 0; i < top; i++) {
    ids[i] = room.ranked[i].token;
    values[i] = (float)(room.ranked[i].score - whole);
  }
}

static void find_logprobs(const float* logits, int rows, int size, const int64_t* tokens, int top, float* own,
                          int64_t* ids, float* values, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && rows > 1)
  for (int r = 0; r < rows; r++) {
    static thread_local DrawRoom room;
    logprobs_of(logits + (size_t)r * size, size, tokens[r], top, room, own + r, ids + (size_t)r * top,
                values + (size_t)r * top);
  }
}
