// Cached keys and values, which attention reads in place, and the softmax of their scores.
#pragma once
#include <cmath>
#include <limits>

#include "linear.hpp"

// Cached keys or values: row i of head h begins at `at + i * row + h * head`, in elements of `format`. In INT8 these are
// codes, and the numbers are codes times a float16, `scales[i * scale_row + h * scale_head]`.
struct Memory {
  void* at;
  int64_t row, head;
  int32_t format;
  uint16_t* scales;
  int64_t scale_row, scale_head;

  template <class Element>
  Element* of(int64_t i, int h) const { return (Element*)at + i * row + h * head; }
  uint16_t& scale(int64_t i, int h) const { return scales[i * scale_row + h * scale_head]; }
};

// Calls `run` with an element of a memory's format.
template <class Run>
static inline void with_element(const Memory& memory, Run run) {
  if (memory.format == FLOAT32) return run(float());
  if (memory.format == INT8) return run(int8_t());
  if (memory.format == FLOAT16) return run(Half());
  run(uint16_t());
}

// A float16 near a number that is not below it.
static inline uint16_t half_above(float x) {
  const uint16_t near = half_of(x);
  return float_of_half(near) < x ? half_of(x * (1 + 0x1p-10f) + 0x1p-24f) : near;
}

// Rounds a row to codes from -127 to 127 and returns their scale, with the bits of attn_cache's `quantize_symmetric`.
static inline uint16_t code_row(const float* row, int size, int8_t* codes) {
  Ints top = all_ints(0);
  // The bits of magnitudes, compared as integers, have the order of the floats, and NaN is the largest.
  for (int d = 0; d < size; d += 16) top = larger_ints(top, magnitude_bits(load16(row + d)));
  const int32_t bits = largest_of_ints(top);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const uint16_t half = half_above(largest / 127.0f);
  const float scale = float_of_half(half);
  const bool whole = scale > 0 && scale <= 65504.0f;
  for (int d = 0; d < size; d += 16) store_bytes(codes + d, whole ? nearest_ints(load16(row + d) / all(scale)) : all_ints(0));
  return half;
}

struct Heads {
  int32_t query, shared, size;
};

// The cache rows that token t sees: `numbers[start[t]]` to `numbers[start[t] + count[t] - 1]`, in order of position.
struct Seen {
  const int64_t *numbers, *start;
  const int32_t* count;
};

// The sum of weights of at most 1, rounded to multiples of 2^-32: exact for up to 2^21 weights, so that neither their
// order nor zeros among them change it. `count` is a multiple of sixteen.
static inline float exact_total(const float* weights, int count) {
  double sums[16] = {}, total = 0;
  for (int j = 0; j < count; j += 16) {
    float whole[16];
    store16(whole, rounded(load16(weights + j) * all(0x1p32f)));
    for (int lane = 0; lane < 16; lane++) sums[lane] += whole[lane];
  }
  for (double sum : sums) total += sum;
  return (float)(total * 0x1p-32);
}

// Softmax of a row of scores in place, with the `exact_total` if `exact`; entries past `count`, up to a multiple of
// sixteen, become zero.
static inline void softmax_row(float* scores, int count, bool exact) {
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
  Floats inverse_total = all(1.0f / (exact ? exact_total(scores, whole) : sum_of(total)));
  for (int j = 0; j < whole; j += 16) store16(scores + j, load16(scores + j) * inverse_total);
}

// The softmax of each row, with its `exact_total`.
static void softmax_rows(const float* scores, int64_t rows, int size, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    static thread_local std::vector<float> room;
    room.resize(size + 15);
    std::copy_n(scores + r * size, size, room.data());
    softmax_row(room.data(), size, true);
    std::copy_n(room.data(), size, out + r * size);
  }
}
