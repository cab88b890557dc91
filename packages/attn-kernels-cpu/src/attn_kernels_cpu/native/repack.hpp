// Repacking of rows of blocks, as stored in files, into the panels of blocks.hpp. No bit of a code or a scale changes.
#pragma once
#include "blocks.hpp"

static inline uint16_t half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}
static inline uint32_t word_at(const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, at, 4);
  return bits;
}

constexpr uint32_t NIBBLES = 0x0f0f0f0f, TWO_BITS = 0x03030303;

// The stored block of a format, of `BYTES` bytes and `SHARED` inputs: `codes` extracts the codes of inputs 4 k to
// 4 k + 3 of its group `g` as bytes, `scales` writes its scales for output `n` of a panel.
template <class Of>
struct Stored;

// Sixteen bytes of codes, those of the first half of the inputs in the lower four bits.
static inline uint32_t four_of_halves(const uint8_t* bytes, int k) { return word_at(bytes + k % 4 * 4) >> k / 4 * 4 & NIBBLES; }

template <>
struct Stored<OfQ4_1> {
  static constexpr int BYTES = 20;
  static uint32_t codes(const uint8_t* block, int, int k) { return four_of_halves(block + 4, k); }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block), to[16 + n] = half_at(block + 2);
  }
};

template <>
struct Stored<OfQ4_0> {
  static constexpr int BYTES = 18;
  static uint32_t codes(const uint8_t* block, int, int k) { return four_of_halves(block + 2, k); }
  static void scales(const uint8_t* block, uint16_t* to, int n) { to[n] = half_at(block); }
};

template <>
struct Stored<OfQ8_0> {
  static constexpr int BYTES = 34;
  static uint32_t codes(const uint8_t* block, int, int k) { return word_at(block + 2 + k * 4) ^ 0x80808080; }
  static void scales(const uint8_t* block, uint16_t* to, int n) { to[n] = half_at(block); }
};

// A format of this project: a float16 step, the zero point in a byte, and sixteen bytes of codes as in Q4_0.
template <>
struct Stored<OfInt4Zeros> {
  static constexpr int BYTES = 19;
  static uint32_t codes(const uint8_t* block, int, int k) { return four_of_halves(block + 3, k); }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block);
    ((uint8_t*)(to + 16))[n] = block[2];
  }
};

template <>
struct Stored<OfQ4_K> {
  static constexpr int BYTES = 144;
  static uint32_t codes(const uint8_t* block, int g, int k) {
    return word_at(block + 16 + g / 2 * 32 + k * 4) >> g % 2 * 4 & NIBBLES;
  }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block), to[16 + n] = half_at(block + 2);
    const uint8_t* packed = block + 4;
    uint8_t* counts = (uint8_t*)(to + 32);
    for (int g = 0; g < 8; g++) {
      const bool early = g < 4;
      counts[g * 32 + n] = early ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
      counts[g * 32 + 16 + n] = early ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    }
  }
};

template <>
struct Stored<OfQ6_K> {
  static constexpr int BYTES = 210;
  static uint32_t codes(const uint8_t* block, int g, int k) {
    const uint8_t *lower = block + g / 4 * 64 + g % 2 * 32, *upper = block + 128 + g / 4 * 32;
    return (word_at(lower + k * 4) >> g % 4 / 2 * 4 & NIBBLES) | (word_at(upper + k * 4) >> g % 4 * 2 & TWO_BITS) << 4;
  }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block + 208);
    for (int i = 0; i < 16; i++) ((uint8_t*)(to + 16))[i * 16 + n] = block[192 + i];
  }
};

// Writes the codes of group `g` for one output, whose words in the panel begin at `to`.
template <class Of>
static inline void keep_codes(const uint8_t* block, int g, uint8_t* to) {
  uint32_t fours[8], upper[2] = {0, 0};
  for (int k = 0; k < 8; k++) fours[k] = Stored<Of>::codes(block, g, k);
  if constexpr (Of::CODE_BYTES == EightBits::CODE_BYTES) {
    for (int k = 0; k < 8; k++) std::memcpy(to + k * 64, fours + k, 4);
    return;
  }
  for (int s = 0; s < 4; s++) {
    const uint32_t word = (fours[s] & NIBBLES) | (fours[4 + s] & NIBBLES) << 4;
    std::memcpy(to + s * 64, &word, 4);
    for (int half = 0; half < 2; half++) upper[half] |= (fours[half * 4 + s] >> 4 & TWO_BITS) << s * 2;
  }
  if constexpr (Of::CODE_BYTES == SixBits::CODE_BYTES)
    for (int half = 0; half < 2; half++) std::memcpy(to + 256 + half * 64, upper + half, 4);
}

template <class Of>
static void repack_blocks(const uint8_t* rows, const Linear& l, int threads) {
  const int panels = (l.outputs + 15) / 16, groups = l.inputs / GROUP, per = Of::SHARED / GROUP, blocks = groups / per;
  const size_t codes = codes_of_panel<Of>(l.inputs), scales = scales_of_panel<Of>(l.inputs);
#pragma omp parallel for num_threads(threads)
  for (int panel = 0; panel < panels; panel++) {
    uint8_t* to = (uint8_t*)l.weights + panel * codes;
    uint16_t* of = (uint16_t*)l.scales + panel * scales;
    if (l.outputs - panel * 16 < 16) {  // outputs past the last have zero codes and scales
      std::memset(to, 0, codes);
      std::memset(of, 0, scales * 2);
    }
    for (int n = 0; n < std::min(16, l.outputs - panel * 16); n++) {
      const uint8_t* block = rows + (size_t)(panel * 16 + n) * blocks * Stored<Of>::BYTES;
      for (int b = 0; b < blocks; b++, block += Stored<Of>::BYTES) {
        Stored<Of>::scales(block, of + (size_t)b * Of::SCALES, n);
        for (int g = 0; g < per; g++) keep_codes<Of>(block, g, to + (size_t)(b * per + g) * Of::CODE_BYTES + n * 4);
      }
    }
  }
}

static void repack(const uint8_t* rows, const Linear& l, int threads) {
  with_format(l.format, [&](auto of) { repack_blocks<decltype(of)>(rows, l, threads); });
}
