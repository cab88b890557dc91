// Attention of the queries that share keys and values, of one or more neighbouring new tokens of a request: keys are
// transposed once and values read once for many rows. A row has the same sums in the same order alone and among others.
#pragma once
#include <type_traits>

#include "attend.hpp"

constexpr int KEYS_TOGETHER = 32;  // the keys that are transposed at once, a multiple of sixteen
constexpr int FETCHED_AHEAD = 16;  // rows of the cache are fetched so many rows before their turn
constexpr int NEAR_ROWS = 64;      // the most rows of values that all rows of a tile are mixed with together
constexpr int NEAR_FLOATS = 16 * 1024;  // the most floats of them, for all heads, to stay in the L2 cache beside the weights

// How many times sixteen sums a row has at once, so that few rows also have enough to hide their latency.
template <int ROWS>
constexpr int panels_of = Shape::MIXED_ROWS * Shape::MIXED_PANELS >= 4 * ROWS ? 4 : Shape::MIXED_ROWS * Shape::MIXED_PANELS >= 2 * ROWS ? 2 : 1;

// Calls `run` with the number of rows that come next as a constant, and returns it: what is left, in equal parts.
template <int ROWS = Shape::MIXED_ROWS, class Run>
static inline int some_rows(int left, Run run) {
  if constexpr (ROWS > 1) {
    const int parts = (left + Shape::MIXED_ROWS - 1) / Shape::MIXED_ROWS;
    if ((left + parts - 1) / parts < ROWS) return some_rows<ROWS - 1>(left, run);
  }
  run(std::integral_constant<int, ROWS>());
  return ROWS;
}

// Fetches a row of a head into the cache.
template <class Element>
static inline void fetch_row(const Element* at, int size) {
  for (int d = 0; d < size; d += 64 / sizeof(Element)) __builtin_prefetch(at + d, 0, 3);
}

// Transposes sixteen cached keys [16, size] of a head and calls `take` with each element of them, in order; the last of
// `left` keys is repeated. Later keys are fetched meanwhile.
template <class Element, class Take>
static inline void transpose_keys(const Memory& key, int head, const int64_t* numbers, int left, int size, Take take) {
  constexpr bool CODES = std::is_same_v<Element, int8_t>;
  const Element *keys[16], *later[16];
  uint16_t halves[16];
  for (int i = 0; i < 16; i++) {
    const int64_t number = numbers[std::min(i, left - 1)];
    keys[i] = key.of<Element>(number, head);
    later[i] = key.of<Element>(numbers[std::min(i + FETCHED_AHEAD, left - 1)], head);
    if (CODES) halves[i] = key.scale(number, head);
  }
  const Floats scales = CODES ? load_halves(halves) : all(1.0f);
  for (int d = 0; d < size; d += 16) {
    Floats lanes[16];
    for (int i = 0; i < 16; i++) {
      lanes[i] = load16(keys[i] + d);
      if (d % (64 / sizeof(Element)) == 0) __builtin_prefetch(later[i] + d, 0, 3);
    }
    transpose16(lanes);
    for (int i = 0; i < 16; i++) {
      if constexpr (CODES) lanes[i] = lanes[i] * scales;
      take(d + i, lanes[i]);
    }
  }
}

// Scores of ROWS queries with sixteen cached keys, of which `left` are left; the sums are those of `score_rows`.
template <class Element, int ROWS>
static inline void score_cached(const float* queries, const Memory& key, int head, const int64_t* numbers, int left, int size,
                                float scale, float* out, int stride) {
  Floats sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = all(0.0f);
  transpose_keys<Element>(key, head, numbers, left, size, [&](int d, Floats lanes) {
    for (int r = 0; r < ROWS; r++) sums[r] = fmadd(all(queries[r * size + d]), lanes, sums[r]);
  });
  for (int r = 0; r < ROWS; r++) store16(out + (size_t)r * stride, sums[r] * all(scale));
}

// Scores of ROWS queries with PANELS times sixteen keys. Each is one chain of sums over the elements of a head.
template <int ROWS, int PANELS>
static inline void score_rows(const float* queries, const float* transposed, int size, float scale, float* out, int stride) {
  Floats sums[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sums[r][p] = all(0.0f);
  for (int d = 0; d < size; d++) {
    Floats key[PANELS];
    for (int p = 0; p < PANELS; p++) key[p] = load16(transposed + (p * size + d) * 16);
    for (int r = 0; r < ROWS; r++) {
      const Floats query = all(queries[r * size + d]);
      for (int p = 0; p < PANELS; p++) sums[r][p] = fmadd(query, key[p], sums[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store16(out + (size_t)r * stride + p * 16, sums[r][p] * all(scale));
}

// Adds the values [last - first, size] times the weights `first` to `last` - 1 of ROWS rows to `out` [ROWS, size], in
// which sums go on.
template <int ROWS, int PANELS>
static inline void mix_panels(const float* weights, int stride, const float* values, int first, int last, int size, float* out) {
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = load16(out + r * size + p * 16);
  for (int j = first; j < last; j++, values += size) {
    Floats value[PANELS];
    for (int p = 0; p < PANELS; p++) value[p] = load16(values + p * 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Floats weight = all(weights[(size_t)r * stride + j]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(weight, value[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store16(out + r * size + p * 16, sum[r][p]);
}

template <int ROWS>
static inline void mix_rows(const float* weights, int stride, const float* values, int first, int last, int size, float* out) {
  if (first >= last) return;
  int d = 0;
  for (; d + panels_of<ROWS> * 16 <= size; d += panels_of<ROWS> * 16)
    mix_panels<ROWS, panels_of<ROWS>>(weights, stride, values + d, first, last, size, out + d);
  for (; d < size; d += 16) mix_panels<ROWS, 1>(weights, stride, values + d, first, last, size, out + d);
}

// The keys of the tile that a row of the tile sees: `first` to `last` - 1.
struct Span {
  int first, last;
};

// Mixes rows, each with its span of keys; `values` [any, size] are those of key `base` and later ones.
static void mix_some(const float* weights, int stride, const float* values, int base, const Span* spans, int rows, int size,
                     float* out) {
  for (int r = 0; r < rows;)
    r += some_rows(rows - r, [&](auto many) {
      constexpr int ROWS = decltype(many)::value;
      Span common = spans[r];
      for (int i = 1; i < ROWS; i++) common = {std::max(common.first, spans[r + i].first), std::min(common.last, spans[r + i].last)};
      if (common.first > common.last) common = {spans[r].last, spans[r].last};
      const float* from = weights + (size_t)r * stride;
      float* to = out + r * size;
      auto at = [&](int key) { return values + (int64_t)(key - base) * size; };
      auto alone = [&](int i, int first, int last) {
        mix_rows<1>(from + (size_t)i * stride, stride, at(first), first, last, size, to + i * size);
      };
      // Keys before and after those that all rows see are added for each row separately, in order.
      for (int i = 0; i < ROWS; i++) alone(i, spans[r + i].first, std::min(common.first, spans[r + i].last));
      mix_rows<ROWS>(from, stride, at(common.first), common.first, common.last, size, to);
      for (int i = 0; i < ROWS; i++) alone(i, std::max(common.last, spans[r + i].first), spans[r + i].last);
    });
}

// Buffers for `heads` heads of keys and values: queries and outputs [heads, rows, size], weights [heads, rows, stride],
// values [heads, near, size].
struct TileRoom {
  std::vector<float> queries, transposed, values, weights, out;
  std::vector<Span> spans, some;
  int heads, stride, near;

  // Whether all rows are of one token and computed together: each key and value is read once, so that none is copied.
  bool once() const { return (int)spans.size() <= Shape::MIXED_ROWS && spans[0].last == spans.back().last; }
};

// Scores of all rows and heads with some cached keys, from `j` on; all heads of a key are read before the next keys, as they lie together.
template <class Element>
static void score_keys(const Memory& key, int shared, const int64_t* numbers, int j, int count, int size, float scale, TileRoom& room) {
  const int rows = room.spans.size();
  for (int h = 0; h < room.heads; h++) {
    const float* query = room.queries.data() + (size_t)h * rows * size;
    if (room.once()) {
      some_rows(rows, [&](auto many) {
        for (int k = j; k < std::min(j + KEYS_TOGETHER, count); k += 16)
          score_cached<Element, decltype(many)::value>(query, key, shared + h, numbers + k, count - k, size, scale,
                                                       room.weights.data() + (size_t)h * rows * room.stride + k, room.stride);
      });
      continue;
    }
    for (int k = 0; k < KEYS_TOGETHER; k += 16) {
      const int first = std::min(j + k, count - 1);
      float* to = room.transposed.data() + k * size;
      transpose_keys<Element>(key, shared + h, numbers + first, count - first, size,
                              [&](int d, Floats lanes) { store16(to + d * 16, lanes); });
    }
    for (int r = 0; r < rows;)
      r += some_rows(rows - r, [&](auto many) {
        constexpr int ROWS = decltype(many)::value, PANELS = std::min(panels_of<ROWS>, KEYS_TOGETHER / 16);
        const int row = h * rows + r;
        for (int k = 0; k < KEYS_TOGETHER && j + k < room.spans[r + ROWS - 1].last; k += PANELS * 16)
          score_rows<ROWS, PANELS>(query + r * size, room.transposed.data() + k * size, size, scale,
                                   room.weights.data() + (size_t)row * room.stride + j + k, room.stride);
      });
  }
}

// A cached row of a head, read as floats.
template <class Element>
struct CachedRow {
  const Element* at;
  Floats scale;

  CachedRow(const Memory& memory, int64_t number, int head) : at(memory.of<Element>(number, head)) {
    if constexpr (std::is_same_v<Element, int8_t>) scale = all(float_of_half(memory.scale(number, head)));
  }
  Floats operator()(int d) const {
    if constexpr (std::is_same_v<Element, int8_t>) return load16(at + d) * scale;
    return load16(at + d);
  }
};

// Like `mix_panels`, of the cached values of a head, from element `d` on, which are not copied first.
template <class Element, int ROWS, int PANELS>
static inline void mix_cached(const float* weights, int stride, const Memory& value, int head, const int64_t* numbers, int count,
                              int left, int d, int size, float* out) {
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = load16(out + r * size + d + p * 16);
  for (int j = 0; j < count; j++) {
    const CachedRow<Element> row(value, numbers[j], head);
    const Element* later = value.of<Element>(numbers[std::min(j + FETCHED_AHEAD, left - 1)], head) + d;
    Floats values[PANELS];
    for (int p = 0; p < PANELS; p++) {
      values[p] = row(d + p * 16);
      if (p * 16 % (64 / sizeof(Element)) == 0) __builtin_prefetch(later + p * 16, 0, 3);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Floats weight = all(weights[(size_t)r * stride + j]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(weight, values[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store16(out + r * size + d + p * 16, sum[r][p]);
}

// Mixes all rows of one token with some cached values, from `first` on.
template <class Element>
static void mix_once(const Memory& value, int shared, const int64_t* numbers, int first, int count, int size, TileRoom& room) {
  const int rows = room.spans.size(), some = std::min(room.near, count - first);
  for (int h = 0; h < room.heads; h++)
    some_rows(rows, [&](auto many) {
      constexpr int ROWS = decltype(many)::value, PANELS = panels_of<ROWS>;
      const float* weights = room.weights.data() + (size_t)h * rows * room.stride + first;
      float* out = room.out.data() + h * rows * size;
      int d = 0;
      for (; d + PANELS * 16 <= size; d += PANELS * 16)
        mix_cached<Element, ROWS, PANELS>(weights, room.stride, value, shared + h, numbers + first, some, count - first, d, size, out);
      for (; d < size; d += 16)
        mix_cached<Element, ROWS, 1>(weights, room.stride, value, shared + h, numbers + first, some, count - first, d, size, out);
    });
}

// Mixes all rows and heads with some cached values, from `first` on: rows of a cache are far apart, often by a power of
// two, so that few of them stay in the L1 cache unless they are copied, in the order in which they lie in memory.
template <class Element>
static void mix_values(const Memory& value, int shared, const int64_t* numbers, int first, int count, int size, TileRoom& room) {
  const int rows = room.spans.size(), last = std::min(first + room.near, count), apart = room.near * size;
  for (int r = 0; r < rows; r++) {
    room.some[r].first = std::max(room.spans[r].first, first);
    room.some[r].last = std::max(room.some[r].first, std::min(room.spans[r].last, last));
  }
  for (int j = first; j < last; j++)
    for (int h = 0; h < room.heads; h++) {
      if (j + FETCHED_AHEAD < count) fetch_row(value.of<Element>(numbers[j + FETCHED_AHEAD], shared + h), size);
      const CachedRow<Element> row(value, numbers[j], shared + h);
      float* to = room.values.data() + h * apart + (j - first) * size;
      for (int d = 0; d < size; d += 16) store16(to + d, row(d));
    }
  for (int h = 0; h < room.heads; h++)
    mix_some(room.weights.data() + (size_t)h * rows * room.stride, room.stride, room.values.data() + h * apart, first, room.some.data(),
             rows, size, room.out.data() + h * rows * size);
}

// Attends the queries in `room`, each row to its span of the keys `numbers[0]` to `numbers[count - 1]` of the heads from
// `shared` on; `exact` is that of `softmax_row`.
template <class Element>
static void attend_rows(const Memory& key, const Memory& value, int shared, const int64_t* numbers, int count, int size,
                        float scale, bool exact, TileRoom& room) {
  const int rows = room.spans.size(), all_rows = room.heads * rows;
  // The last sixteen scores of a row may exceed the tile.
  room.stride = (count + KEYS_TOGETHER - 1) / KEYS_TOGETHER * KEYS_TOGETHER + 16;
  room.weights.resize((size_t)all_rows * room.stride);
  room.transposed.resize(size * KEYS_TOGETHER);
  room.near = std::max(8, std::min(NEAR_ROWS, NEAR_FLOATS / (room.heads * size)));
  room.values.resize(room.heads * size * room.near);
  room.out.assign((size_t)all_rows * size, 0.0f);
  room.some.resize(rows);
  for (int j = 0; j < count; j += KEYS_TOGETHER) score_keys<Element>(key, shared, numbers, j, count, size, scale, room);
  for (int r = 0; r < all_rows; r++) {
    const Span seen = room.spans[r % rows];
    softmax_row(room.weights.data() + (size_t)r * room.stride + seen.first, seen.last - seen.first, exact);
  }
  const auto mix = room.once() ? mix_once<Element> : mix_values<Element>;
  for (int j = 0; j < count; j += room.near) mix(value, shared, numbers, j, count, size, room);
}
