// Attention of the queries that share keys and values, of one or more neighbouring new tokens of a request: keys are
// transposed once and values read once for many rows. A row has the same sums in the same order alone and among others.
#pragma once
#include <type_traits>

#include "attend.hpp"

constexpr int KEYS_TOGETHER = 32;  // the keys that are transposed at once, a multiple of sixteen
constexpr int FETCHED_AHEAD = 32;  // rows of the cache are fetched so many rows before their turn
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

// Transposes sixteen cached keys [16, size] of a head into `transposed` [size, 16]; the last of `here` keys is repeated.
template <class Element>
static inline void transpose_keys(const Memory& key, int head, const int64_t* numbers, int here, int size, float* transposed) {
  constexpr bool CODES = std::is_same_v<Element, int8_t>;
  const Element* keys[16];
  uint16_t halves[16];
  for (int i = 0; i < 16; i++) {
    const int64_t number = numbers[std::min(i, here - 1)];
    keys[i] = key.of<Element>(number, head);
    if (CODES) halves[i] = key.scale(number, head);
  }
  const Floats scales = CODES ? load_halves(halves) : all(1.0f);
  for (int d = 0; d < size; d += 16) {
    Floats lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = load16(keys[i] + d);
    transpose16(lanes);
    for (int i = 0; i < 16; i++) {
      if constexpr (CODES) lanes[i] = lanes[i] * scales;
      store16(transposed + (d + i) * 16, lanes[i]);
    }
  }
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
};

// Scores of all rows and heads with some cached keys, from `j` on; all heads of a key are read before the next keys, as they lie together.
template <class Element>
static void score_keys(const Memory& key, int shared, const int64_t* numbers, int j, int count, int size, float scale, TileRoom& room) {
  const int rows = room.spans.size();
  for (int h = 0; h < room.heads; h++) {
    for (int i = j + FETCHED_AHEAD; i < std::min(j + FETCHED_AHEAD + KEYS_TOGETHER, count); i++)
      fetch_row(key.of<Element>(numbers[i], shared + h), size);
    for (int k = 0; k < KEYS_TOGETHER; k += 16) {
      const int first = std::min(j + k, count - 1);
      transpose_keys<Element>(key, shared + h, numbers + first, std::min(16, count - first), size, room.transposed.data() + k * size);
    }
    for (int r = 0; r < rows;)
      r += some_rows(rows - r, [&](auto many) {
        constexpr int ROWS = decltype(many)::value, PANELS = std::min(panels_of<ROWS>, KEYS_TOGETHER / 16);
        const int row = h * rows + r;
        for (int k = 0; k < KEYS_TOGETHER && j + k < room.spans[r + ROWS - 1].last; k += PANELS * 16)
          score_rows<ROWS, PANELS>(room.queries.data() + row * size, room.transposed.data() + k * size, size, scale,
                                   room.weights.data() + (size_t)row * room.stride + j + k, room.stride);
      });
  }
}

// Copies a cached row of a head as floats.
template <class Element>
static inline void copy_row(const Memory& memory, int64_t number, int head, int size, float* to, Element) {
  const Element* row = memory.of<Element>(number, head);
  if constexpr (std::is_same_v<Element, int8_t>) {
    const Floats scale = all(float_of_half(memory.scale(number, head)));
    for (int d = 0; d < size; d += 16) store16(to + d, load16(row + d) * scale);
  } else {
    for (int d = 0; d < size; d += 16) store16(to + d, load16(row + d));
  }
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
      copy_row(value, numbers[j], shared + h, size, room.values.data() + h * apart + (j - first) * size, Element());
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
  for (int j = 0; j < count; j += room.near) mix_values<Element>(value, shared, numbers, j, count, size, room);
}
