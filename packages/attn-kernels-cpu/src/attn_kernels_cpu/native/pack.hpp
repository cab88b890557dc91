// Packing of weights [outputs, inputs] into panels of sixteen outputs, as the tiles read them.
#pragma once
#include "tiles.hpp"

static inline float weight_of(const float* w) { return *w; }
static inline float weight_of(const uint16_t* w) {
  uint32_t bits = (uint32_t)*w << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Panels [inputs, 16] of unchanged elements; outputs past the last are zero.
template <class Element>
static void pack_floats(const Element* w, int outputs, int inputs, Element* packed, int threads) {
  int panels = (outputs + 15) / 16;
#pragma omp parallel for num_threads(threads)
  for (int p = 0; p < panels; p++)
    for (int k = 0; k < inputs; k++)
      for (int n = 0; n < 16; n++) {
        int output = p * 16 + n;
        packed[((size_t)p * inputs + k) * 16 + n] = output < outputs ? w[(size_t)output * inputs + k] : Element(0);
      }
}

// Panels [inputs / 32, 16 pairs of inputs, 16 outputs, 2]. The number of panels is even; inputs and outputs past the
// last are zero.
static void pack_pairs(const uint16_t* w, int outputs, int inputs, uint16_t* packed, int threads) {
  int panels = (outputs + PAIR - 1) / PAIR * 2, blocks = (inputs + DEPTH - 1) / DEPTH;
#pragma omp parallel for num_threads(threads)
  for (int p = 0; p < panels; p++)
    for (int k = 0; k < blocks * DEPTH; k++)
      for (int n = 0; n < 16; n++) {
        int output = p * 16 + n;
        uint16_t* panel = packed + (size_t)p * blocks * TILE;
        panel[k / 2 * 32 + n * 2 + k % 2] = output < outputs && k < inputs ? w[(size_t)output * inputs + k] : 0;
      }
}

// Panels [inputs / 4, 16, 4] of round(w / step) + zero, where step is the largest magnitude of an output's weights /
// 127. Inputs and panels are padded to multiples of `depth` and `together`.
template <class Element>
static void pack_int8(const Element* w, const Linear& l, int zero, int depth, int together, int threads) {
  int outputs = l.outputs, inputs = l.inputs, padded = (inputs + depth - 1) / depth * depth;
  int panels = ((outputs + 15) / 16 + together - 1) / together * together;
  uint8_t* packed = (uint8_t*)l.weights;
  float* steps = (float*)l.steps;
#pragma omp parallel for num_threads(threads)
  for (int output = 0; output < panels * 16; output++) {
    const Element* row = w + (size_t)output * inputs;
    uint8_t* to = packed + (size_t)(output / 16) * padded * 16 + (output % 16) * 4;
    float largest = 0;
    if (output < outputs)
      for (int k = 0; k < inputs; k++) largest = std::max(largest, std::fabs(weight_of(row + k)));
    float step = largest / 127.0f, inverse = step > 0 ? 1.0f / step : 0.0f;
    steps[output] = step;
    for (int k = 0; k < padded; k++) {
      float value = output < outputs && k < inputs ? weight_of(row + k) * inverse : 0.0f;
      to[(k / 4) * 64 + k % 4] = (uint8_t)((int)std::nearbyint(value) + zero);
    }
  }
}

// GGUF's Q4_1: nibbles 0 to 15 of (w - least) / step for groups of 32 inputs. Byte j of quarter s of a group holds
// input 4 s + j in its lower half and input 4 s + j + 16 in its upper half.
template <class Element>
static void pack_int4(const Element* w, int outputs, int inputs, uint8_t* packed, uint16_t* scales, int threads) {
  int panels = (outputs + 15) / 16, groups = inputs / GROUP;
#pragma omp parallel for num_threads(threads)
  for (int output = 0; output < panels * 16; output++)
    for (int g = 0; g < groups; g++) {
      float value[GROUP];
      for (int i = 0; i < GROUP; i++)
        value[i] = output < outputs ? weight_of(w + (size_t)output * inputs + g * GROUP + i) : 0.0f;
      float least = *std::min_element(value, value + GROUP), most = *std::max_element(value, value + GROUP);
      uint16_t* to = scales + ((size_t)(output / 16) * groups + g) * 32 + output % 16;
      to[0] = half_of((most - least) / 15.0f);
      to[16] = half_of(least);
      float step = float_of_half(to[0]), start = float_of_half(to[16]), inverse = step > 0 ? 1.0f / step : 0.0f;
      uint8_t nibble[GROUP];
      for (int i = 0; i < GROUP; i++)
        nibble[i] = (uint8_t)std::min(15.0f, std::max(0.0f, std::nearbyint((value[i] - start) * inverse)));
      uint8_t* bytes = packed + (size_t)(output / 16) * inputs * 8 + (size_t)g * 256 + (output % 16) * 4;
      for (int s = 0; s < 4; s++)
        for (int j = 0; j < 4; j++)
          bytes[s * 64 + j] = (uint8_t)(nibble[4 * s + j] | nibble[4 * s + j + 16] << 4);
    }
}
