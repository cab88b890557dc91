// Weights in the block formats of GGUF, GPTQ and AWQ: a weight is code * step + least, where a code is an unsigned
// integer of four, six or eight bits with the same bits as in the file, and steps and minima (`least`) are shared by a
// group of inputs.
//
// Panels consist of groups of 32 inputs, with the codes of a group in words of four inputs for each of sixteen outputs:
// input 16 h + 4 s + j is byte j of word s of half h.
#pragma once
#include "tiles.hpp"

// For tile functions, which must not be inlined: they are large and have many callers. What they call must be, so that
// sums stay in registers.
#define SHARED_CODE __attribute__((noinline))
#define IN_PLACE static inline __attribute__((always_inline))

struct Scales {
  Floats step, least;
};

// The layout of codes: `word(group, i)` is the i-th word of a group, in which each code has FIELD bits.
//
// Four bits: byte j of word s holds the codes of both halves, that of the first half in its lower four bits.
struct FourBits {
  static constexpr int CODE_BYTES = 256, FIELD = 4;
  static Ints word(const uint8_t* group, int i) { return load_ints(group + i * 64); }
};

struct EightBits {
  static constexpr int CODE_BYTES = 512, FIELD = 8;
  static Ints word(const uint8_t* group, int i) { return load_ints(group + i * 64); }
};

// Six bits, read as eight. Stored are the lower four bits as in `FourBits`, then the upper two bits in one word per
// half, those of byte j of word s in bits 2 s and 2 s + 1 of byte j.
struct SixBits {
  static constexpr int CODE_BYTES = 384, FIELD = 8;
  static Ints word(const uint8_t* group, int i) {
    const int half = i / 4, s = i % 4;
    Ints lower = load_ints(group + s * 64), upper = load_ints(group + 256 + half * 64);
    if (half) lower = right<4>(lower);
    upper = s == 0 ? left<4>(upper) : s == 1 ? left<2>(upper) : s == 2 ? upper : right<2>(upper);
    return or_ints(and_ints(lower, all_ints(0x0f0f0f0f)), and_ints(upper, all_ints(0x30303030)));
  }
};

// The scales of a format: for every `SHARED` inputs a panel stores `SCALES` 16-bit words, from which `scales` computes
// step and minimum of half `half` of group `group`. `DEEP` is whether the two halves of a group differ, `ZERO` the code of the
// weight 0 where it is the same for all, else 0.
struct OfQ4_1 : FourBits {
  static constexpr int SHARED = 32, SCALES = 32, ZERO = 0;
  static constexpr bool DEEP = false;
  static Scales scales(const uint16_t* at, int group, int) {
    return {load_halves(at + group * SCALES), load_halves(at + group * SCALES + 16)};
  }
};

struct OfQ4_0 : FourBits {
  static constexpr int SHARED = 32, SCALES = 16, ZERO = 8;
  static constexpr bool DEEP = false;
  static Scales scales(const uint16_t* at, int group, int) {
    Floats step = load_halves(at + group * SCALES);
    return {step, step * all(-8.0f)};
  }
};

struct OfQ8_0 : EightBits {
  static constexpr int SHARED = 32, SCALES = 16, ZERO = 128;
  static constexpr bool DEEP = false;
  static Scales scales(const uint16_t* at, int group, int) {
    Floats step = load_halves(at + group * SCALES);
    return {step, step * all(-128.0f)};
  }
};

// Two float16 factors, then for each of eight groups an integer multiple of each.
struct OfQ4_K : FourBits {
  static constexpr int SHARED = 256, SCALES = 160, ZERO = 0;
  static constexpr bool DEEP = false;
  static Scales scales(const uint16_t* at, int group, int) {
    at += group / 8 * SCALES;
    const uint8_t* counts = (const uint8_t*)(at + 32) + group % 8 * 32;
    Floats least = load_halves(at + 16) * floats_of(load_bytes(counts + 16));
    return {load_halves(at) * floats_of(load_bytes(counts)), all(0.0f) - least};
  }
};

// A float16 factor, then for each of sixteen half groups a signed integer multiple of it.
struct OfQ6_K : SixBits {
  static constexpr int SHARED = 256, SCALES = 144, ZERO = 32;
  static constexpr bool DEEP = true;
  static Scales scales(const uint16_t* at, int group, int half) {
    at += group / 8 * SCALES;
    const int8_t* counts = (const int8_t*)(at + 16) + (group % 8 * 2 + half) * 16;
    Floats step = load_halves(at) * floats_of(load_bytes(counts));
    return {step, step * all(-32.0f)};
  }
};

// A float16 step and the zero point, a code.
struct OfInt4Zeros : FourBits {
  static constexpr int SHARED = 32, SCALES = 24, ZERO = 0;
  static constexpr bool DEEP = false;
  static Scales scales(const uint16_t* at, int group, int) {
    at += group * SCALES;
    Floats step = load_halves(at);
    return {step, step * (all(0.0f) - floats_of(load_bytes((const uint8_t*)(at + 16))))};
  }
};

// Calls `take` with the type for the block format of a layer's weights.
template <class Take>
static auto with_format(int32_t format, Take take) {
  switch (format) {
    case Q8_0: return take(OfQ8_0());
    case Q4_0: return take(OfQ4_0());
    case Q4_K: return take(OfQ4_K());
    case Q6_K: return take(OfQ6_K());
    case INT4_ZEROS: return take(OfInt4Zeros());
    default: return take(OfQ4_1());
  }
}

template <class Of>
static inline size_t scales_of_panel(int inputs) {
  return (size_t)inputs / Of::SHARED * Of::SCALES;
}
template <class Of>
static inline size_t codes_of_panel(int inputs) {
  return (size_t)inputs / GROUP * Of::CODE_BYTES;
}

struct PanelSize {
  size_t bytes, scales;
};

static PanelSize size_of_panel(const Linear& l) {
  const size_t inputs = l.inputs;
  switch (l.format) {
    case FLOAT32: return {inputs * 64, 0};
    case BFLOAT16: return {inputs * 32, 0};
    case INT8: return {inputs * 16, 0};
    case BFLOAT16_PAIRS: return {(inputs + DEPTH - 1) / DEPTH * 1024, 0};
    case INT8_FOURS: return {(inputs + INT8_DEPTH - 1) / INT8_DEPTH * 1024, 0};
    default:
      return with_format(l.format, [&](auto of) {
        return PanelSize{codes_of_panel<decltype(of)>(l.inputs), scales_of_panel<decltype(of)>(l.inputs)};
      });
  }
}

// The outputs of panels `first` to `last` as a layer of their own.
static Linear some_panels(const Linear& l, int first, int last) {
  Linear some = l;
  const PanelSize size = size_of_panel(l);
  some.outputs = std::min(l.outputs, last * 16) - first * 16;
  some.weights = (const uint8_t*)l.weights + first * size.bytes;
  if (l.scales) some.scales = l.scales + first * size.scales;
  if (l.steps) some.steps = l.steps + first * 16;
  if (l.bias) some.bias = l.bias + first * 16;
  return some;
}

// Products of 4-bit codes with int8 inputs, with integer sums within a group.
template <class Of, int ROWS, int PANELS>
SHARED_CODE static void nibble_tile(const Linear& l, const QuantisedRows& x, int row, int panel, Into to) {
  const size_t inputs = l.inputs, groups = inputs / GROUP, scales = scales_of_panel<Of>(l.inputs);
  const uint8_t* w = (const uint8_t*)l.weights + (size_t)panel * inputs * 8;
  const uint16_t* of = l.scales + panel * scales;
  const int8_t* values = x.values + row * inputs;
  const float *scale = x.scale + row * groups, *total = x.sum + row * groups;
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
  for (size_t g = 0; g < groups; g++) {
    NibbleSums dot[ROWS][PANELS];
#pragma GCC unroll 4
    for (int s = 0; s < GROUP / 8; s++) {
      NibbleWeights weight[PANELS];
      for (int p = 0; p < PANELS; p++) weight[p] = nibble_weights(w + p * inputs * 8 + (g * 4 + s) * 64);
      for (int r = 0; r < ROWS; r++) {
        const int8_t* at = values + r * inputs + g * GROUP + s * 4;
        Fours one = fours_of(at), other = fours_of(at + 16);
        for (int p = 0; p < PANELS; p++) dot[r][p].add(weight[p], one, other);
      }
    }
    for (int p = 0; p < PANELS; p++) {
      const Scales scaled = Of::scales(of + p * scales, g, 0);
      for (int r = 0; r < ROWS; r++) {
        Floats whole = floats_of(dot[r][p].total()) * all(scale[r * groups + g]);
        sum[r][p] = fmadd(whole, scaled.step, sum[r][p]);
        sum[r][p] = fmadd(all(total[r * groups + g]), scaled.least, sum[r][p]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}

// Products of codes with a constant zero point (128 for Q8_0, 32 for Q6_K), as signed bytes, with int8 inputs.
template <class Of, int ROWS, int PANELS>
SHARED_CODE static void byte_tile(const Linear& l, const QuantisedRows& x, int row, int panel, Into to) {
  const size_t inputs = l.inputs, groups = inputs / GROUP;
  const size_t codes = codes_of_panel<Of>(l.inputs), scales = scales_of_panel<Of>(l.inputs);
  const uint8_t* w = (const uint8_t*)l.weights + panel * codes;
  const uint16_t* of = l.scales + panel * scales;
  const int8_t* values = x.values + row * inputs;
  const float* scale = x.scale + row * groups;
  const int32_t *offset = x.offset + row * groups, *first = Of::DEEP ? x.first + row * groups : nullptr;
  // Added to a code, this gives the weight's signed integer plus 128.
  const Ints middle = all_ints(Of::DEEP ? 0x60606060 : 0);
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
  for (size_t g = 0; g < groups; g++, w += Of::CODE_BYTES, values += GROUP) {
    ByteSums dot[ROWS][PANELS];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      if (Of::DEEP || half == 0)
        for (int r = 0; r < ROWS; r++)
          for (int p = 0; p < PANELS; p++) {
            int32_t all_of = offset[r * groups + g];
            if (Of::DEEP) all_of = half ? all_of - first[r * groups + g] : first[r * groups + g];
            dot[r][p] = ByteSums(all_of);
          }
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) {
        ByteWeights weight[PANELS];
        for (int p = 0; p < PANELS; p++) weight[p] = byte_weights_of(add_ints(Of::word(w + p * codes, half * 4 + s), middle));
        for (int r = 0; r < ROWS; r++) {
          Fours value = fours_of(values + r * inputs + half * 16 + s * 4);
          for (int p = 0; p < PANELS; p++) dot[r][p].add(weight[p], value);
        }
      }
      if (Of::DEEP || half == 1)
        for (int p = 0; p < PANELS; p++) {
          const Floats step = Of::scales(of + p * scales, g, half).step;
          for (int r = 0; r < ROWS; r++)
            sum[r][p] = fmadd(floats_of(dot[r][p].total()) * all(scale[r * groups + g]), step, sum[r][p]);
        }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}
