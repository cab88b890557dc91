// Attention of new tokens to cached latents: all heads share the keys, whose first elements are the values, too. Each
// row of the cache is read once for many heads; what has been summed is scaled down where a later score is larger.
#pragma once
#include "attend_tile.hpp"

constexpr int LATENTS = 32;  // the rows of the cache that are scored and then mixed, a multiple of sixteen
constexpr int SIDE = Shape::MIXED_ROWS * Shape::MIXED_PANELS >= 20 ? 4 : 2;  // heads, and rows, that are multiplied together

// Queries [tokens, heads, size + rest_size], of which the last elements meet those of `rest`, and outputs [tokens, heads, size].
struct LatentAttention {
  const float* query;
  float* out;
  Memory latent, rest;
  int32_t heads, size, rest_size;
  Seen seen;
  int32_t tokens, threads;
  float scale;
};

// Buffers for some heads: scores, then weights [heads, LATENTS], products [SIDE, LATENTS, 16], whose lanes are yet to be
// added, and for each head the largest score, sixteen sums of weights, and the factor of what was summed before.
struct LatentRoom {
  std::vector<float> weights, products, highest, totals, factors;
};

// Rows of the cache, from `first` on; after the last of `count` it is repeated.
template <class Element>
struct LatentRows {
  const Element *latent[LATENTS], *rest[LATENTS];
  int count;

  LatentRows(const LatentAttention& a, const int64_t* numbers, int first, int all) : count(std::min(LATENTS, all - first)) {
    for (int i = 0; i < LATENTS; i++) {
      const int64_t number = numbers[std::min(first + i, all - 1)];
      latent[i] = a.latent.of<Element>(number, 0);
      rest[i] = a.rest.of<Element>(number, 0);
    }
  }
};

template <class Element>
static inline void add_products(const float* const* queries, const Element* const* rows, int from, int size, Floats sums[SIDE][SIDE]) {
  for (int d = 0; d < size; d += 16) {
    Floats row[SIDE];
    for (int j = 0; j < SIDE; j++) row[j] = load16(rows[j] + d);
    for (int h = 0; h < SIDE; h++) {
      const Floats query = load16(queries[h] + from + d);
      for (int j = 0; j < SIDE; j++) sums[h][j] = fmadd(query, row[j], sums[h][j]);
    }
  }
}

// Scores of up to SIDE heads.
template <class Element>
static inline void score_latents(const LatentAttention& a, const float* query, int heads, const LatentRows<Element>& rows,
                                 float* products, float* scores) {
  const float* queries[SIDE];
  for (int h = 0; h < SIDE; h++) queries[h] = query + (size_t)std::min(h, heads - 1) * (a.size + a.rest_size);
  for (int j = 0; j < LATENTS; j += SIDE) {
    Floats sums[SIDE][SIDE];
    for (auto& row : sums)
      for (Floats& sum : row) sum = all(0.0f);
    add_products(queries, rows.latent + j, 0, a.size, sums);
    add_products(queries, rows.rest + j, a.size, a.rest_size, sums);
    for (int h = 0; h < SIDE; h++)
      for (int i = 0; i < SIDE; i++) store16(products + (h * LATENTS + j + i) * 16, sums[h][i]);
  }
  for (int h = 0; h < heads; h++)
    for (int j = 0; j < LATENTS; j += 16) {
      Floats lanes[16];
      for (int i = 0; i < 16; i++) lanes[i] = load16(products + (h * LATENTS + j + i) * 16);
      transpose16(lanes);
      for (int apart = 8; apart; apart /= 2)
        for (int i = 0; i < apart; i++) lanes[i] = lanes[i] + lanes[i + apart];
      store16(scores + h * LATENTS + j, lanes[0] * all(a.scale));
    }
}

// Turns scores of a head into weights relative to the largest score so far.
static inline void weigh(float* scores, int count, float& highest, float* totals, float& factor) {
  for (int j = count; j < LATENTS; j++) scores[j] = -std::numeric_limits<float>::infinity();
  Floats top = all(highest), total = all(0.0f);
  for (int j = 0; j < LATENTS; j += 16) top = larger(load16(scores + j), top);
  const float now = largest_of(top);
  for (int j = 0; j < LATENTS; j += 16) {
    const Floats weight = exp16(load16(scores + j) - all(now));
    store16(scores + j, weight);
    total = total + weight;
  }
  float factors[16];
  store16(factors, exp16(all(highest - now)));
  factor = factors[0];
  store16(totals, fmadd(load16(totals), all(factor), total));
  highest = now;
}

// Adds weighted latents to `out` [ROWS, size], whose former sums are multiplied by `factors`; fetches the `next` latents,
// one for each that is read, so that memory is never waited for.
template <int ROWS, int PANELS, class Element>
static inline void mix_latents(const float* weights, const float* factors, const LatentRows<Element>& rows,
                               const LatentRows<Element>& next, int d, int size, float* out) {
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = load16(out + r * size + d + p * 16) * all(factors[r]);
  for (int j = 0; j < rows.count; j++) {
    Floats value[PANELS];
    for (int p = 0; p < PANELS; p++) {
      __builtin_prefetch(next.latent[j] + d + p * 16, 0, 2);
      value[p] = load16(rows.latent[j] + d + p * 16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Floats weight = all(weights[r * LATENTS + j]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(weight, value[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store16(out + r * size + d + p * 16, sum[r][p]);
}

// Attends `heads` neighbouring heads of a token.
template <class Element>
static void attend_latent_heads(const LatentAttention& a, int token, int first, int heads) {
  static thread_local LatentRoom room;
  const int count = a.seen.count[token], size = a.size, width = size + a.rest_size;
  const int64_t* numbers = a.seen.numbers + a.seen.start[token];
  const float* query = a.query + ((int64_t)token * a.heads + first) * width;
  float* out = a.out + ((int64_t)token * a.heads + first) * size;
  room.weights.resize((size_t)heads * LATENTS);
  room.products.resize(SIDE * LATENTS * 16);
  room.highest.assign(heads, -std::numeric_limits<float>::infinity());
  room.totals.assign(heads * 16, 0.0f);
  room.factors.resize(heads);
  std::memset(out, 0, sizeof(float) * heads * size);
  LatentRows<Element> rows(a, numbers, 0, count);
  for (int j = 0; j < count; j += LATENTS) {
    const LatentRows<Element> next(a, numbers, j + LATENTS, count);
    for (int h = 0; h < heads; h += SIDE)
      score_latents(a, query + h * width, std::min(SIDE, heads - h), rows, room.products.data(), room.weights.data() + h * LATENTS);
    for (int h = 0; h < heads; h++)
      weigh(room.weights.data() + h * LATENTS, rows.count, room.highest[h], room.totals.data() + h * 16, room.factors[h]);
    for (int h = 0; h < heads;)
      h += some_rows(heads - h, [&](auto many) {
        constexpr int ROWS = decltype(many)::value, PANELS = panels_of<ROWS>;
        const float *weights = room.weights.data() + h * LATENTS, *factors = room.factors.data() + h;
        int d = 0;
        for (; d + PANELS * 16 <= size; d += PANELS * 16)
          mix_latents<ROWS, PANELS>(weights, factors, rows, next, d, size, out + h * size);
        for (; d < size; d += 16) mix_latents<ROWS, 1>(weights, factors, rows, next, d, size, out + h * size);
      });
    rows = next;
  }
  for (int h = 0; h < heads; h++) {
    const Floats share = all(1.0f / sum_of(load16(room.totals.data() + h * 16)));
    for (int d = 0; d < size; d += 16) store16(out + h * size + d, load16(out + h * size + d) * share);
  }
}

// Threads share out the tokens and, if these are fewer, the heads of each.
static void attend_latents(const LatentAttention& a) {
  const int parts = std::min((a.heads + SIDE - 1) / SIDE, (a.threads + a.tokens - 1) / std::max(1, a.tokens));
  const int each = (a.heads + parts - 1) / std::max(1, parts);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, 1) if (a.threads > 1)
  for (int task = 0; task < a.tokens * parts; task++) {
    const int first = task % parts * each, heads = std::min(each, a.heads - first);
    if (heads <= 0) continue;
    if (a.latent.format == FLOAT32)
      attend_latent_heads<float>(a, task / parts, first, heads);
    else
      attend_latent_heads<uint16_t>(a, task / parts, first, heads);
  }
}
