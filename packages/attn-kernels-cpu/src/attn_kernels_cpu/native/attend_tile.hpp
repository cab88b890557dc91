// Attention of the queries that share keys and values, of one or more neighbouring new tokens of a request: keys are
// transposed once and values read once for many rows. A row has the same sums in the same order alone and among others.
#pragma once
#include <type_traits>

#include "attend.hpp"

constexpr int FETCHED_AHEAD = 64;       // rows are fetched so many rows before their turn: those of a head are far apart
constexpr int NEAR_ROWS = 128;  // the values that all rows of a tile are mixed with while they are in the L1 cache

// Fetches a row of a head into the cache.
template <class Element>
static inline void fetch_row(const Element* at, int size) {
  for (int d = 0; d < size; d += 64 / sizeof(Element)) __builtin_prefetch(at + d, 0, 3);
}

// Transposes sixteen cached keys [16, size] into `transposed` [size, 16]; the last of `here` keys is repeated.
template <class Element>
static inline void transpose_keys(const Element* keys, int64_t row, const int64_t* numbers, int here, int size,
                                  float* transposed) {
  for (int d = 0; d < size; d += 16) {
    Floats lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = load16(keys + numbers[std::min(i, here - 1)] * row + d);
    transpose16(lanes);
    for (int i = 0; i < 16; i++) store16(transposed + (d + i) * 16, lanes[i]);
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

// Adds values `first` to `last` - 1 times the weights of ROWS rows to `out` [ROWS, size], in which sums go on.
template <int ROWS, int PANELS, class Element>
static inline void mix_panels(const float* weights, int stride, const Element* values, int64_t row,
                              const int64_t* numbers, int first, int last, int size, float* out) {
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = load16(out + r * size + p * 16);
  for (int j = first; j < last; j++) {
    if (ROWS < Shape::MIXED_ROWS || ROWS == 1)  // more rows read values that are near
      for (int p = 0; p < PANELS; p++) __builtin_prefetch(values + (numbers[j] + FETCHED_AHEAD) * row + p * 16, 0, 3);
    Floats value[PANELS];
    for (int p = 0; p < PANELS; p++) value[p] = load16(values + numbers[j] * row + p * 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Floats weight = all(weights[(size_t)r * stride + j]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(weight, value[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store16(out + r * size + p * 16, sum[r][p]);
}

template <int ROWS, class Element>
static inline void mix_rows(const float* weights, int stride, const Element* values, int64_t row,
                            const int64_t* numbers, int first, int last, int size, float* out) {
  if (first >= last) return;
  int d = 0;
  constexpr int PANELS = Shape::MIXED_PANELS;
  for (; PANELS > 1 && d + PANELS * 16 <= size; d += PANELS * 16)
    mix_panels<ROWS, PANELS>(weights, stride, values + d, row, numbers, first, last, size, out + d);
  for (; d < size; d += 16)
    mix_panels<ROWS, 1>(weights, stride, values + d, row, numbers, first, last, size, out + d);
}

// The keys of the tile that a row of the tile sees: `first` to `last` - 1.
struct Span {
  int first, last;
};

template <class Element>
static void mix_some(const float* weights, int stride, const Element* values, int64_t row, const int64_t* numbers,
                     const Span* spans, int rows, int size, float* out) {
  for (int r = 0; r < rows;) {
    constexpr int MAX_MIXED = Shape::MIXED_ROWS;
    int many = rows - r >= MAX_MIXED ? MAX_MIXED : rows - r >= 4 ? 4 : 1;
    Span common = spans[r];
    for (int i = 1; i < many; i++) common = {std::max(common.first, spans[r + i].first), std::min(common.last, spans[r + i].last)};
    if (common.first > common.last) common = {spans[r].last, spans[r].last};
    const float* from = weights + (size_t)r * stride;
    float* to = out + r * size;
    auto alone = [&](int i, int first, int last) {
      mix_rows<1>(from + (size_t)i * stride, stride, values, row, numbers, first, last, size, to + i * size);
    };
    // Keys before and after those that all rows see are added for each row separately, in order.
    for (int i = 0; i < many; i++) alone(i, spans[r + i].first, std::min(common.first, spans[r + i].last));
    if (many == MAX_MIXED) mix_rows<MAX_MIXED>(from, stride, values, row, numbers, common.first, common.last, size, to);
    else if (many == 4) mix_rows<4>(from, stride, values, row, numbers, common.first, common.last, size, to);
    else alone(0, common.first, common.last);
    for (int i = 0; i < many; i++) alone(i, std::max(common.last, spans[r + i].first), spans[r + i].last);
    r += many;
  }
}

template <class Element>
static void mix_tile(const float* weights, int stride, const Element* values, int64_t row, const int64_t* numbers, int count,
                     const std::vector<Span>& spans, std::vector<Span>& some, int size, float* out) {
  for (int first = 0; first < count; first += NEAR_ROWS) {
    const int last = std::min(first + NEAR_ROWS, count);
    for (size_t r = 0; r < spans.size(); r++) {
      some[r].first = std::max(spans[r].first, first);
      some[r].last = std::max(some[r].first, std::min(spans[r].last, last));
    }
    mix_some(weights, stride, values, row, numbers, some.data(), spans.size(), size, out);
  }
}

struct TileRoom {
  std::vector<float> queries, transposed, weights, out;
  std::vector<Span> spans, some;
};

// Attends the query rows [rows, size] in `room`, each to its span of the keys `numbers[0]` to `numbers[count - 1]`.
template <class Element>
static void attend_rows(const Memory& key, const Memory& value, int shared, const int64_t* numbers, int count, int size,
                        float scale, TileRoom& room) {
  const Element* keys = (const Element*)key.at + shared * key.head;
  const Element* values = (const Element*)value.at + shared * value.head;
  constexpr int PANELS = Shape::MIXED_PANELS, KEYS = PANELS * 16;
  int rows = room.spans.size(), stride = (count + KEYS - 1) / KEYS * KEYS + 16;  // the last sixteen of a row may exceed the tile
  room.weights.resize((size_t)rows * stride);
  room.transposed.resize(size * KEYS);
  room.out.assign((size_t)rows * size, 0.0f);
  float* weights = room.weights.data();
  for (int j = 0; j < count; j += KEYS) {
    for (int p = 0; p < PANELS; p++) {
      const int first = std::min(j + p * 16, count - 1);
      for (int i = 0; i < 16; i++)
        if (first + FETCHED_AHEAD + i < count) fetch_row(keys + numbers[first + FETCHED_AHEAD + i] * key.row, size);
      transpose_keys(keys, key.row, numbers + first, std::min(16, count - first), size, room.transposed.data() + p * size * 16);
    }
    auto score = [&](auto many, int r) {
      constexpr int ROWS = decltype(many)::value;
      if (j >= room.spans[r + ROWS - 1].last) return;
      score_rows<ROWS, PANELS>(room.queries.data() + r * size, room.transposed.data(), size, scale, weights + (size_t)r * stride + j, stride);
    };
    int r = 0;
    for (; r + Shape::MIXED_ROWS <= rows; r += Shape::MIXED_ROWS) score(std::integral_constant<int, Shape::MIXED_ROWS>(), r);
    for (; r + 4 <= rows; r += 4) score(std::integral_constant<int, 4>(), r);
    for (; r < rows; r++) score(std::integral_constant<int, 1>(), r);
  }
  for (int r = 0; r < rows; r++)
    softmax_row(weights + (size_t)r * stride + room.spans[r].first, room.spans[r].last - room.spans[r].first);
  room.some.resize(rows);
  mix_tile(weights, stride, values, value.row, numbers, count, room.spans, room.some, size, room.out.data());
}
