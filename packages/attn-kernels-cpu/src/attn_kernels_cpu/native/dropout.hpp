// Dropout of attention weights by the random words of attn_core/dropout.py: Philox4x32-10 (Salmon et al. 2011), where a
// word depends only on the seed and the indices of a query and a key. Integer arithmetic, so it is the same on every
// CPU.
#pragma once
#include <algorithm>
#include <cstdint>

// A weight whose word is below `threshold` becomes zero, others are multiplied by `scale`. Batch rows are counted from
// `first`.
struct Dropout {
  uint32_t seed_low, seed_high, offset, first, threshold;
  float scale;
};

constexpr int COUNTERS_TOGETHER = 16, KEYS_OF_A_COUNTER = 4;
constexpr uint32_t PHILOX_MULTIPLIERS[] = {0xD2511F53u, 0xCD9E8D57u}, PHILOX_WEYL[] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int PHILOX_ROUNDS = 10;

// words[w][i] is word w of the counter with the first number `four` + i, which belongs to key 4 (four + i) + w.
static inline void philox(uint32_t four, uint32_t query, uint32_t row, const Dropout& d,
                          uint32_t words[KEYS_OF_A_COUNTER][COUNTERS_TOGETHER]) {
  uint32_t *a = words[0], *b = words[1], *c = words[2], *e = words[3];
  for (int i = 0; i < COUNTERS_TOGETHER; i++) a[i] = four + i, b[i] = query, c[i] = row, e[i] = d.offset;
  uint32_t low = d.seed_low, high = d.seed_high;
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
    for (int i = 0; i < COUNTERS_TOGETHER; i++) {
      const uint64_t one = (uint64_t)c[i] * PHILOX_MULTIPLIERS[1], two = (uint64_t)a[i] * PHILOX_MULTIPLIERS[0];
      a[i] = (uint32_t)(one >> 32) ^ b[i] ^ low;
      b[i] = (uint32_t)one;
      c[i] = (uint32_t)(two >> 32) ^ e[i] ^ high;
      e[i] = (uint32_t)two;
    }
    low += PHILOX_WEYL[0];
    high += PHILOX_WEYL[1];
  }
}

// The factors, 0 or the scale, of a query's weights for the first `count` keys. `factors` must have room for 64 more.
static void dropout_factors(const Dropout& d, uint32_t row, uint32_t query, int count, float* factors) {
  uint32_t words[KEYS_OF_A_COUNTER][COUNTERS_TOGETHER];
  for (int key = 0; key < count; key += COUNTERS_TOGETHER * KEYS_OF_A_COUNTER) {
    philox((uint32_t)key / KEYS_OF_A_COUNTER, query, row, d, words);
    float* to = factors + key;
    for (int i = 0; i < COUNTERS_TOGETHER; i++)
      for (int w = 0; w < KEYS_OF_A_COUNTER; w++)
        to[i * KEYS_OF_A_COUNTER + w] = words[w][i] >= d.threshold ? d.scale : 0.0f;
  }
}
