// Products of a few rows with a few panels of sixteen outputs. Every output is summed over its inputs in one fixed
// order, whatever the number of rows, so results are batch-invariant.
#pragma once
#include "activations.hpp"
#include "registers.hpp"

struct Linear {
  int32_t format, inputs, outputs;
  int32_t parts;           // AMX tiles: bfloat16 or int8 numbers that an input is split into; JOINED: number of layers
  int32_t int16;           // weights in blocks: whether inputs are rounded to int16, else to int8
  const void* weights;     // panels of sixteen outputs, see pack.hpp; JOINED: the layers' addresses
  const uint16_t* scales;  // weights in blocks: see blocks.hpp
  const float* steps;      // int8: [outputs rounded up to 16]
  const float* bias;       // [outputs rounded up to 16] or null
};

constexpr int PAIR = 2 * 16;      // outputs of two panels
constexpr int DEPTH = 32;         // inputs of a tile
constexpr int TILE = 16 * DEPTH;  // elements of a tile
constexpr int INT8_DEPTH = 64;    // inputs of a tile of int8

// Whether the layer is multiplied in the tile registers of AMX.
static inline bool in_tiles(const Linear& l) {
#ifdef TILE_REGISTERS
  return l.parts > 0 && l.format != JOINED;
#else
  return false;
#endif
}

struct Share {
  int first, last;
};

static inline Share part_of(int count, int threads, int thread) {
  return {(int)((int64_t)count * thread / threads), (int)((int64_t)count * (thread + 1) / threads)};
}

struct Into {
  float* out;
  size_t stride;
  bool add;
};

static inline void finish(const Linear& l, Into to, int row, int panel, Floats value) {
  int n = panel * 16, here = l.outputs - n;
  float* at = to.out + row * to.stride + n;
  if (l.bias) value = value + load16(l.bias + n);
  if (to.add) value = value + load_some(at, here, all(0.0f));
  store_some(at, here, value);
}

template <int ROWS, int PANELS, class Element>
static void float_tile(const Linear& l, const float* x, int row, int panel, Into to) {
  const size_t inputs = l.inputs;
  const Element* w = (const Element*)l.weights + (size_t)panel * inputs * 16;
  x += row * inputs;
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
  for (size_t k = 0; k < inputs; k++) {
    Floats weight[PANELS];
    for (int p = 0; p < PANELS; p++) weight[p] = load16(w + p * inputs * 16 + k * 16);
    for (int r = 0; r < ROWS; r++) {
      Floats value = all(x[r * inputs + k]);
      for (int p = 0; p < PANELS; p++) sum[r][p] = fmadd(value, weight[p], sum[r][p]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p]);
}

template <int ROWS, int PANELS>
static void int8_tile(const Linear& l, const QuantisedRows& x, int row, int panel, Into to) {
  const size_t inputs = l.inputs, groups = inputs / GROUP;
  const uint8_t* w = (const uint8_t*)l.weights + (size_t)panel * inputs * 16;
  const int8_t* values = x.values + row * inputs;
  const float* scale = x.scale + row * groups;
  const int32_t* offset = x.offset + row * groups;
  Floats sum[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sum[r][p] = all(0.0f);
  for (size_t g = 0; g < groups; g++) {
    ByteSums dot[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) dot[r][p] = ByteSums(offset[r * groups + g]);
    // Unrolled, because compilers (g++ 12) otherwise copy every sum once per iteration.
#pragma GCC unroll 8
    for (int s = 0; s < GROUP / 4; s++) {
      ByteWeights weight[PANELS];
      for (int p = 0; p < PANELS; p++) weight[p] = byte_weights(w + p * inputs * 16 + (g * 8 + s) * 64);
      for (int r = 0; r < ROWS; r++) {
        Fours value = fours_of(values + r * inputs + g * GROUP + s * 4);
        for (int p = 0; p < PANELS; p++) dot[r][p].add(weight[p], value);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++)
        sum[r][p] = fmadd(floats_of(dot[r][p].total()), all(scale[r * groups + g]), sum[r][p]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) finish(l, to, row + r, panel + p, sum[r][p] * load16(l.steps + (panel + p) * 16));
}
