// Repacking of rows of blocks, as stored in files, into the panels of blocks.hpp. No bit of a code or a scale changes.
#pragma once
#include "blocks.hpp"

static inline void low_and_high(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = bytes[i] & 15, codes[i + 16] = bytes[i] >> 4;
}

static inline uint16_t half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

// The stored block of a format, of `BYTES` bytes and `SHARED` inputs: `codes` extracts the codes of its group `g`,
// `scales` writes its scales for output `n` of a panel.
template <class Of>
struct Stored;

template <>
struct Stored<OfQ4_1> {
  static constexpr int BYTES = 20;
  static void codes(const uint8_t* block, int, uint8_t* to) { low_and_high(block + 4, to); }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block), to[16 + n] = half_at(block + 2);
  }
};

template <>
struct Stored<OfQ4_0> {
  static constexpr int BYTES = 18;
  static void codes(const uint8_t* block, int, uint8_t* to) { low_and_high(block + 2, to); }
  static void scales(const uint8_t* block, uint16_t* to, int n) { to[n] = half_at(block); }
};

template <>
struct Stored<OfQ8_0> {
  static constexpr int BYTES = 34;
  static void codes(const uint8_t* block, int, uint8_t* to) {
    for (int i = 0; i < GROUP; i++) to[i] = block[2 + i] ^ 128;
  }
  static void scales(const uint8_t* block, uint16_t* to, int n) { to[n] = half_at(block); }
};

// A format of this project: a float16 step, the zero point in a byte, and sixteen bytes of codes as in Q4_0.
template <>
struct Stored<OfInt4Zeros> {
  static constexpr int BYTES = 19;
  static void codes(const uint8_t* block, int, uint8_t* to) { low_and_high(block + 3, to); }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block);
    ((uint8_t*)(to + 16))[n] = block[2];
  }
};

template <>
struct Stored<OfQ4_K> {
  static constexpr int BYTES = 144;
  static void codes(const uint8_t* block, int g, uint8_t* to) {
    const uint8_t* bytes = block + 16 + g / 2 * 32;
    for (int i = 0; i < GROUP; i++) to[i] = bytes[i] >> g % 2 * 4 & 15;
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
  static void codes(const uint8_t* block, int g, uint8_t* to) {
    const uint8_t *lower = block + g / 4 * 64 + g % 2 * 32, *upper = block + 128 + g / 4 * 32;
    for (int i = 0; i < GROUP; i++)
      to[i] = (lower[i] >> g % 4 / 2 * 4 & 15) | (upper[i] >> g % 4 * 2 & 3) << 4;
  }
  static void scales(const uint8_t* block, uint16_t* to, int n) {
    to[n] = half_at(block + 208);
    for (int i = 0; i < 16; i++) ((uint8_t*)(to + 16))[i * 16 + n] = block[192 + i];
  }
};

// Writes the codes of one group for output `n` of a panel.
template <class Of>
static inline void keep_codes(const uint8_t* codes, uint8_t* to, int n) {
  to += n * 4;
  for (int half = 0; half < 2; half++)
    for (int s = 0; s < 4; s++)
      for (int j = 0; j < 4; j++) {
        const uint8_t code = codes[half * 16 + s * 4 + j];
        if constexpr (Of::CODE_BYTES == EightBits::CODE_BYTES) {
          to[half * 256 + s * 64 + j] = code;
        } else {
          to[s * 64 + j] |= (code & 15) << half * 4;
          if constexpr (Of::CODE_BYTES == SixBits::CODE_BYTES) to[256 + half * 64 + j] |= code >> 4 << s * 2;
        }
      }
}

template <class Of>
static void repack_blocks(const uint8_t* rows, const Linear& l, int threads) {
  const int panels = (l.outputs + 15) / 16, groups = l.inputs / GROUP, per = Of::SHARED / GROUP, blocks = groups / per;
  const size_t codes = codes_of_panel<Of>(l.inputs), scales = scales_of_panel<Of>(l.inputs);
#pragma omp parallel for num_threads(threads)
  for (int panel = 0; panel < panels; panel++) {
    uint8_t* to = (uint8_t*)l.weights + panel * codes;
    uint16_t* of = (uint16_t*)l.scales + panel * scales;
    // Outputs past the last have zero codes and scales.
    std::memset(to, 0, codes);
    std::memset(of, 0, scales * 2);
    for (int n = 0; n < std::min(16, l.outputs - panel * 16); n++) {
      const uint8_t* block = rows + (size_t)(panel * 16 + n) * blocks * Stored<Of>::BYTES;
      for (int b = 0; b < blocks; b++, block += Stored<Of>::BYTES) {
        Stored<Of>::scales(block, of + (size_t)b * Of::SCALES, n);
        for (int g = 0; g < per; g++) {
          uint8_t found[GROUP];
          Stored<Of>::codes(block, g, found);
          keep_codes<Of>(found, to + (size_t)(b * per + g) * Of::CODE_BYTES, n);
        }
      }
    }
  }
}

static void repack(const uint8_t* rows, const Linear& l, int threads) {
  with_format(l.format, [&](auto of) { repack_blocks<decltype(of)>(rows, l, threads); });
}
