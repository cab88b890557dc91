// Weights in blocks times inputs in float32. Codes are integers that float32 represents exactly, so they are multiplied
// directly: code times input is summed over the inputs that share a step; this sum times the step, plus the sum of the
// inputs times the minimum, is added to the output. Neither weights nor inputs are rounded, only sums, as in float32.
//
// A code is not shifted to the lowest bits of its word: with b bits below it, it is 2^b times as large, and its input
// is scaled by 2^-b.
#pragma once
#include "blocks.hpp"

// For functions that must be inlined, so that their sums stay in registers.
#define IN_PLACE static inline __attribute__((always_inline))

// Rows of inputs in the order of the codes, scaled to match them, and the sums of every sixteen inputs. Inputs below
// 2e-31 lose their last bits.
struct CodedInputs {
  const float *values, *sums;

  CodedInputs from(size_t row, size_t width) const { return {values + row * width, sums + row * width / 16}; }
};

// The codes of a word and the words of a group, for codes of FIELD bits.
template <int FIELD>
struct Fields {
  static constexpr int COUNT = 32 / FIELD, WORDS = GROUP / COUNT;
  static constexpr int input(int word, int field) {
    return FIELD == 4 ? field % 2 * 16 + word * 4 + field / 2 : word * 4 + field;
  }
  // The last code is shifted down: in place it would set the sign bit.
  static constexpr float share(int field) { return field == COUNT - 1 ? 1.0f : 1.0f / (float)(1 << field * FIELD); }
};

template <int FIELD>
static inline void order_inputs(const float* x, float* values, float* sums) {
  using Of = Fields<FIELD>;
#pragma GCC unroll 8
  for (int word = 0; word < Of::WORDS; word++)
#pragma GCC unroll 8
    for (int field = 0; field < Of::COUNT; field++)
      values[word * Of::COUNT + field] = x[Of::input(word, field)] * Of::share(field);
  sums[0] = sum_of(load16(x));
  sums[1] = sum_of(load16(x + 16));
}

// The inputs of a layer in this order, in a buffer of the calling thread.
template <int FIELD>
static CodedInputs ordered(const Linear& l, const float* x, int rows, int threads) {
  static thread_local std::vector<float> values, sums;
  const size_t groups = l.inputs / GROUP;
  values.resize(rows * groups * GROUP);
  sums.resize(rows * groups * 2);
  float *to = values.data(), *of = sums.data();  // the calling thread's buffers, not those of the other threads
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int row = 0; row < rows; row++)
    for (size_t g = row * groups; g < (row + 1) * groups; g++) order_inputs<FIELD>(x + g * GROUP, to + g * GROUP, of + g * 2);
  return {to, of};
}

template <int FIELD, int PLACE>
static inline Floats code_at(Ints word) {
  if constexpr (PLACE == Fields<FIELD>::COUNT - 1) return floats_of(right<32 - FIELD>(word));
  return floats_of(and_ints(word, all_ints(((1 << FIELD) - 1) << PLACE * FIELD)));
}

// Adds the products with the codes of a word, from code PLACE on.
template <int FIELD, int ROWS, int PANELS, int PLACE = 0>
IN_PLACE void add_word(const Ints (&word)[PANELS], const float* x, size_t inputs, Floats (&dot)[ROWS][PANELS]) {
  Floats code[PANELS];
  for (int p = 0; p < PANELS; p++) code[p] = code_at<FIELD, PLACE>(word[p]);
  for (int r = 0; r < ROWS; r++) {
    Floats value = all(x[r * inputs + PLACE]);
    for (int p = 0; p < PANELS; p++) dot[r][p] = fmadd(value, code[p], dot[r][p]);
  }
  if constexpr (PLACE + 1 < Fields<FIELD>::COUNT) add_word<FIELD, ROWS, PANELS, PLACE + 1>(word, x, inputs, dot);
}

// Scales the sums of a group, or of one of its halves, and adds them to those of the outputs.
template <class Of, int ROWS, int PANELS>
IN_PLACE void add_scaled(const uint16_t* scales, size_t apart, size_t g, int half, const float* sums, size_t inputs,
                         const Floats (&dot)[ROWS][PANELS], Floats (&sum)[ROWS][PANELS]) {
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; p++) {
    const Scales scaled = Of::scales(scales + p * apart, g, half);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const float* of = sums + r * inputs / 16;
      sum[r][p] = fmadd(dot[r][p], scaled.step, sum[r][p]);
      sum[r][p] = fmadd(all(Of::DEEP ? of[half] : of[0] + of[1]), scaled.least, sum[r][p]);
    }
  }
}

template <int ROWS, int PANELS>
IN_PLACE void clear(Floats (&sum)[ROWS][PANELS]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
}

template <class Of, int ROWS, int PANELS>
SHARED_CODE static void coded_tile(const Linear& l, CodedInputs from, int row, int panel, Into to) {
  using Word = Fields<Of::FIELD>;
  const size_t inputs = l.inputs, codes = codes_of_panel<Of>(l.inputs), scales = scales_of_panel<Of>(l.inputs);
  const uint8_t* w = (const uint8_t*)l.weights + panel * codes;
  const uint16_t* of = l.scales + panel * scales;
  const CodedInputs x = from.from(row, inputs);
  Floats sum[ROWS][PANELS], dot[ROWS][PANELS];
  clear(sum);
  for (size_t g = 0; g < inputs / GROUP; g++, w += Of::CODE_BYTES) {
    clear(dot);
#pragma GCC unroll 8
    for (int i = 0; i < Word::WORDS; i++) {
      Ints word[PANELS];
      for (int p = 0; p < PANELS; p++) word[p] = Of::word(w + p * codes, i);
      // Prefetch the codes of the next tile: hardware prefetching stops at the end of a page of 4 KB.
      if (i < Of::CODE_BYTES / 64)
        for (int p = 0; p < PANELS; p++) __builtin_prefetch(w + (p + PANELS) * codes + i * 64, 0, 3);
      add_word<Of::FIELD>(word, x.values + g * GROUP + i * Word::COUNT, inputs, dot);
      if (Of::DEEP && i == 3) {
        add_scaled<Of>(of, scales, g, 0, x.sums + g * 2, inputs, dot, sum);
        clear(dot);
      }
    }
    add_scaled<Of>(of, scales, g, Of::DEEP, x.sums + g * 2, inputs, dot, sum);
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}

template <int FIELD, int PLACE = 0>
static inline void store_codes(Ints word, float* to) {
  store16(to + PLACE * 16, code_at<FIELD, PLACE>(word));
  if constexpr (PLACE + 1 < Fields<FIELD>::COUNT) store_codes<FIELD, PLACE + 1>(word, to);
}

// Some panels as a layer of their own with codes in float32, in a buffer of the calling thread.
template <class Of>
SHARED_CODE static Linear widened_panels(const Linear& l, int panel, int count) {
  using Word = Fields<Of::FIELD>;
  static thread_local std::vector<float> room;
  const size_t inputs = l.inputs, codes = codes_of_panel<Of>(l.inputs);
  if (room.size() < count * inputs * 16 + 16) room.resize(count * inputs * 16 + 16);
  float *begin = (float*)(((uintptr_t)room.data() + 63) / 64 * 64), *out = begin;
  const uint8_t* w = (const uint8_t*)l.weights + panel * codes;
  for (size_t g = 0; g < count * inputs / GROUP; g++, w += Of::CODE_BYTES)
    for (int i = 0; i < Word::WORDS; i++, out += Word::COUNT * 16) store_codes<Of::FIELD>(Of::word(w, i), out);
  Linear wide = l;
  wide.weights = begin;
  wide.scales = l.scales + panel * scales_of_panel<Of>(l.inputs);
  wide.outputs = l.outputs - panel * 16;
  if (l.bias) wide.bias = l.bias + panel * 16;
  return wide;
}

// Like `coded_tile`, with the same sums, over codes in float32.
template <class Of, int ROWS, int PANELS>
SHARED_CODE static void widened_tile(const Linear& l, CodedInputs from, int row, int panel, Into to) {
  const size_t inputs = l.inputs, scales = scales_of_panel<Of>(l.inputs);
  const float* w = (const float*)l.weights + panel * inputs * 16;
  const uint16_t* of = l.scales + panel * scales;
  const CodedInputs x = from.from(row, inputs);
  constexpr int DEEP = Of::DEEP ? 16 : GROUP;  // inputs that share a step
  Floats sum[ROWS][PANELS], dot[ROWS][PANELS];
  clear(sum);
  for (size_t first = 0; first < inputs; first += DEEP) {
    clear(dot);
    for (size_t k = first; k < first + DEEP; k++, w += 16) {
      Floats code[PANELS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) code[p] = load16(w + p * inputs * 16);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Floats value = all(x.values[r * inputs + k]);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) dot[r][p] = fmadd(value, code[p], dot[r][p]);
      }
    }
    const size_t g = first / GROUP;
    add_scaled<Of>(of, scales, g, first / 16 % 2, x.sums + g * 2, inputs, dot, sum);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}
