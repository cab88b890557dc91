// Cached keys and values, which attention reads in place, and the softmax of their scores.
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
