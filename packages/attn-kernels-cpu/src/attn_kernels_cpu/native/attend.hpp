// Attention of new tokens over cached keys and values in place, without copies, one request at a time.
#pragma once
#include <cmath>
#include <limits>

#include "linear.hpp"

// Cached keys or values: row i of head h begins at `at + i * row + h * head`, in elements of `format`.
struct Memory {
  void* at;
  int64_t row, head;
  int32_t format;
};

struct Heads {
  int32_t query, shared, size;
};

// The cache rows that token t sees: `numbers[start[t]]` to `numbers[start[t] + count[t] - 1]`, in order of position.
struct Seen {
  const int64_t *numbers, *start;
  const int32_t* count;
};

template <class Element>
static inline void scores_of(const float* query, const Element* keys, int64_t row, const int64_t* numbers, int count,
                             int size, float scale, float* out) {
  for (int j = 0; j < count; j += 16) {
    Floats sums[16];
    int here = std::min(16, count - j);
    for (int i = 0; i < 16; i++) {
      const Element* key = keys + numbers[j + std::min(i, here - 1)] * row;
      Floats sum = all(0.0f);
      for (int d = 0; d < size; d += 16) sum = fmadd(load16(query + d), load16(key + d), sum);
      sums[i] = sum;
    }
    store16(out + j, sums16(sums) * all(scale));
  }
}

// Softmax of a row of scores in place; entries past `count`, up to a multiple of sixteen, become zero.
static inline void softmax_row(float* scores, int count) {
  int whole = (count + 15) / 16 * 16;
  for (int j = count; j < whole; j++) scores[j] = -std::numeric_limits<float>::infinity();
  Floats top = load16(scores);
  for (int j = 16; j < whole; j += 16) top = larger(load16(scores + j), top);
  Floats highest = all(largest_of(top)), total = all(0.0f);
  for (int j = 0; j < whole; j += 16) {
    Floats weight = exp16(load16(scores + j) - highest);
    store16(scores + j, weight);
    total = total + weight;
  }
  Floats inverse_total = all(1.0f / sum_of(total));
  for (int j = 0; j < whole; j += 16) store16(scores + j, load16(scores + j) * inverse_total);
}

// Weighted sums of values for some query heads that share them; `weights` has a row of `stride` elements for each head.
template <int QUERIES, class Element>
static inline void mix(const float* weights, int stride, const Element* values, int64_t row, const int64_t* numbers,
                       int count, int size, float* out) {
  for (int d = 0; d < size; d += 16) {
    Floats sum[QUERIES];
    for (int q = 0; q < QUERIES; q++) sum[q] = all(0.0f);
    for (int j = 0; j < count; j++) {
      Floats value = load16(values + numbers[j] * row + d);
      for (int q = 0; q < QUERIES; q++)
        sum[q] = fmadd(all(weights[q * stride + j]), value, sum[q]);
    }
    for (int q = 0; q < QUERIES; q++) store16(out + q * size + d, sum[q]);
  }
}

template <class Element>
static void attend_group(const float* query, const Memory& key, const Memory& value, int shared, int queries,
                         const int64_t* numbers, int count, int size, float scale, std::vector<float>& room, float* out) {
  int stride = (count + 15) / 16 * 16;
  if ((int)room.size() < stride * queries) room.resize(stride * queries);
  float* weights = room.data();
  const Element* keys = (const Element*)key.at + shared * key.head;
  const Element* values = (const Element*)value.at + shared * value.head;
  for (int q = 0; q < queries; q++) {
    scores_of(query + q * size, keys, key.row, numbers, count, size, scale, weights + q * stride);
    softmax_row(weights + q * stride, count);
  }
  int q = 0;
  for (; q + 4 <= queries; q += 4)
    mix<4>(weights + q * stride, stride, values, value.row, numbers, count, size, out + q * size);
  for (; q + 3 <= queries; q += 3)
    mix<3>(weights + q * stride, stride, values, value.row, numbers, count, size, out + q * size);
  for (; q < queries; q++)
    mix<1>(weights + q * stride, stride, values, value.row, numbers, count, size, out + q * size);
}
