// Weights in blocks times inputs that are rounded to sixteen bits: 32 neighbours become integers from -32767 to 32767
// times a power of two, the smallest that suffices. Inputs with no more bits than that lose none. Products of codes and
// integers are summed exactly within a group, and these sums scaled and added in float32.
#pragma once
#include "blocks.hpp"

constexpr int TOGETHER = 12;  // neighbouring rows whose integers of a group are contiguous; a tile is within them

// Rows of inputs as integers [rows / TOGETHER, groups, TOGETHER, GROUP], those of a group in the order of
// `store_int16`; everything else is [rows / TOGETHER, groups, TOGETHER], `starts` with `per` numbers in each place.
// `starts` is -ZERO times the sum of the integers that share a step of the weights, where ZERO is the code of the weight
// 0; `sums` is the sum of the inputs of a group.
struct Int16Rows {
  const int16_t* values;
  const float *steps, *sums;
  const int32_t* starts;
  size_t per;

  Int16Rows next() const {
    return {values + TOGETHER * GROUP, steps + TOGETHER, sums + TOGETHER, starts + TOGETHER * per, per};
  }
  static size_t place(size_t row, size_t groups) { return row / TOGETHER * TOGETHER * groups + row % TOGETHER; }
  Int16Rows from(size_t row, size_t width) const {
    const size_t at = place(row, width / GROUP);
    return {values + at * GROUP, steps + at, sums + at, starts + at * per, per};
  }
};

// Rounds thirty-two inputs to `values` times `step`, and returns the sums of the first and last sixteen integers.
static inline std::pair<int32_t, int32_t> round_group(const float* x, int16_t* values, float* step) {
  constexpr int BITS = 15, SMALLEST = BITS, LARGEST = 254;  // biased exponents
  Floats a = load16(x), b = load16(x + 16);
  // The bits of magnitudes, compared as integers, have the order of the floats, and NaN is the largest.
  const int32_t top = largest_of_ints(larger_ints(magnitude_bits(a), magnitude_bits(b)));
  const bool finite = top < 0x7f800000;
  const int32_t exponent = std::min((top + (1 << (23 - BITS))) >> 23, LARGEST);
  Ints first = all_ints(0), second = first;
  *step = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  if (finite && exponent >= SMALLEST) {
    const int32_t bits[2] = {(exponent - BITS + 1) << 23, (254 + BITS - 1 - exponent) << 23};
    float inverse;
    std::memcpy(step, bits, 4);
    std::memcpy(&inverse, bits + 1, 4);
    first = nearest_ints(a * all(inverse));
    second = nearest_ints(b * all(inverse));
  }
  store_int16(values, first, second);
  return {sum_of_ints(first), sum_of_ints(second)};
}

// The inputs of a layer as integers, in buffers of the calling thread.
template <class Of>
static Int16Rows rounded_rows(const Linear& l, const float* x, int rows, int threads) {
  constexpr int PER = Of::DEEP ? 2 : 1;
  static thread_local std::vector<int16_t> values;
  static thread_local std::vector<float> steps, sums;
  static thread_local std::vector<int32_t> starts;
  const size_t groups = l.inputs / GROUP, places = (size_t)(rows + TOGETHER - 1) / TOGETHER * TOGETHER * groups;
  values.resize(places * GROUP);
  steps.resize(places);
  sums.resize(places);
  starts.resize(places * PER);
  // The calling thread's buffers, not those of the other threads.
  int16_t* to = values.data();
  float *step = steps.data(), *sum = sums.data();
  int32_t* start = starts.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int row = 0; row < rows; row++)
    for (size_t g = 0; g < groups; g++) {
      const size_t at = Int16Rows::place(row, groups) + g * TOGETHER;
      const auto [first, second] = round_group(x + (row * groups + g) * GROUP, to + at * GROUP, step + at);
      sum[at] = step[at] * (float)(first + second);
      start[at * PER] = -Of::ZERO * (Of::DEEP ? first : first + second);
      if (Of::DEEP) start[at * PER + 1] = -Of::ZERO * second;
    }
  return {to, step, sum, start, PER};
}

// The place in a group of the integers that a word's codes at bit FIELD * place are multiplied by, two at a time.
template <class Of>
constexpr int pair_at(int word, int place) {
  constexpr int FIELD = Of::FIELD;
  if constexpr (FIELD == 16) return pair_at<typename Of::Narrow>(word / Of::PLACES, word % Of::PLACES);
  return 2 * (FIELD == 4 ? word * 4 + place : word % 4 * 4 + place * 2 + word / 4);
}

// Calls `take(place, codes)` for the codes of a word, two at a time, from those at bit FIELD * PLACE on.
template <class Of, int PANELS, class Take, int PLACE = 0>
IN_PLACE void each_pair(const Ints (&word)[PANELS], Take take) {
  constexpr int FIELD = Of::FIELD;
  constexpr uint32_t MASK = (1 << FIELD) - 1;
  Ints codes[PANELS];
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; p++) {
    if constexpr (PLACE > 0) codes[p] = right<FIELD * PLACE>(word[p]);
    codes[p] = and_ints(PLACE > 0 ? codes[p] : word[p], all_ints(MASK << 16 | MASK));
  }
  take(PLACE, codes);
  if constexpr ((PLACE + 1) * FIELD < 16) each_pair<Of, PANELS, Take, PLACE + 1>(word, take);
}

// The codes of a format in words of two, in int16: what many rows are multiplied by is unpacked once.
template <class Of>
struct Wide : Of {
  using Narrow = Of;
  static constexpr int CODE_BYTES = 1024, FIELD = 16, PLACES = 16 / Of::FIELD;
  static Ints word(const uint8_t* group, int i) { return load_ints(group + i * 64); }

  // A layer of one panel, whose codes are unpacked into a buffer of the calling thread.
  static Linear panel_of(const Linear& l, int panel) {
    static thread_local std::vector<uint8_t> room;
    room.resize(codes_of_panel<Wide>(l.inputs) + 64);
    Linear one = some_panels(l, panel, panel + 1);
    const uint8_t* from = (const uint8_t*)one.weights;
    uint8_t* to = (uint8_t*)(((uintptr_t)room.data() + 63) / 64 * 64);
    one.weights = to;
    const size_t codes = codes_of_panel<Of>(l.inputs);
    for (int g = 0; g < l.inputs / GROUP; g++, from += Of::CODE_BYTES) {
      for (int i = 0; i < Of::CODE_BYTES; i += 64) __builtin_prefetch(from + codes + i, 0, 2);
#pragma GCC unroll 8
      for (int i = 0; i < 16 / PLACES; i++) {
        const Ints word[] = {Of::word(from, i)};
        each_pair<Of>(word, [&](int, const Ints(&codes)[1]) {
          std::memcpy(to, codes, 64);
          to += 64;
        });
      }
    }
    return one;
  }
};

template <class Of, int ROWS, int PANELS>
SHARED_CODE static void int16_tile(const Linear& l, const Int16Rows& from, int row, int panel, Into to) {
  constexpr int PER = Of::DEEP ? 2 : 1, WORDS = Of::FIELD == 4 ? 4 : Of::FIELD / PER;
  const size_t inputs = l.inputs, codes = codes_of_panel<Of>(l.inputs), scales = scales_of_panel<Of>(l.inputs);
  const uint8_t* w = (const uint8_t*)l.weights + panel * codes;
  const uint16_t* of = l.scales + panel * scales;
  Int16Rows x = from.from(row, inputs);
  Floats sum[ROWS][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
  for (size_t g = 0; g < inputs / GROUP; g++, w += Of::CODE_BYTES) {
    for (int half = 0; half < PER; half++) {
      Ints dot[ROWS][PANELS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) dot[r][p] = all_ints(Of::ZERO ? x.starts[r * PER + half] : 0);
#pragma GCC unroll 16
      for (int i = 0; i < WORDS; i++) {
        Ints word[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
          word[p] = Of::word(w + p * codes, half * WORDS + i);
          // The first rows fetch the codes of the next panels: hardware prefetching stops at the end of a page of 4 KB.
          if (Of::FIELD < 16 && row == 0 && half * WORDS + i < Of::CODE_BYTES / 64)
            __builtin_prefetch(w + (p + PANELS) * codes + (half * WORDS + i) * 64, 0, 3);
        }
        each_pair<Of>(word, [&](int place, const Ints(&codes)[PANELS]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) {
            const Fours two = fours_of((const int8_t*)(x.values + r * GROUP + pair_at<Of>(half * WORDS + i, place)));
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) dot[r][p] = add_pairs(dot[r][p], codes[p], two);
          }
        });
      }
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        const Scales scaled = Of::scales(of + p * scales, g, half);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          sum[r][p] = fmadd(floats_of(dot[r][p]) * scaled.step, all(x.steps[r]), sum[r][p]);
          if (!Of::ZERO) sum[r][p] = fmadd(all(x.sums[r]), scaled.least, sum[r][p]);
        }
      }
    }
    x = x.next();
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}
