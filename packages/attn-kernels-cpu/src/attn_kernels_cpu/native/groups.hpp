// Products of int8 rows with int4 weights, with a step and a minimum per group of 32 inputs, in tile registers: a tile
// is one group deep. The registers hold integer sums, which are scaled and added group by group as in `nibble_tile`, so
// that both give the same bits.
#pragma once
#include "registers.hpp"
#include "sums.hpp"

// Selects these products, and tells sums.hpp that the sums are complete.
struct Groups : OnePart {};

constexpr int MIN_TILE_ROWS = 4;  // the fewest rows for which a tile of sixteen pays

static inline bool enough_rows(const Linear& l, int rows) { return l.format != INT4 || rows >= MIN_TILE_ROWS; }

// Unpacks the nibbles of a panel [groups, 4, 64] into bytes [groups, 8, 64].
static inline void widen_panel(const uint8_t* packed, int groups, uint8_t* wide) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int g = 0; g < groups; g++, packed += 256, wide += 512)
    for (int s = 0; s < 4; s++) {
      __m512i both = _mm512_load_si512(packed + s * 64);
      _mm512_store_si512(wide + s * 64, _mm512_and_si512(both, low));
      _mm512_store_si512(wide + 256 + s * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
}

// Integer products [16, 16] of sixteen rows with a panel over the inputs of one group.
static inline void dots_of(const int8_t* rows, const uint8_t* wide, int32_t* dots) {
  _tile_zero(0);
  _tile_loadd(4, rows, GROUP);
  _tile_loadd(6, wide, 64);
  _tile_dpbsud(0, 4, 6);
  _tile_stored(0, dots, 64);
}

constexpr int AHEAD = 2;  // groups whose products are in flight while those of another are summed

// Sums [16, 16] of the first ROWS rows of tile `tile` with an unpacked panel.
template <int ROWS>
static inline void sum_groups(const RowTiles& x, int tile, const uint8_t* wide, const uint16_t* scales, float* sums) {
  alignas(64) int32_t dots[2 * AHEAD][256];
  const int8_t* rows = (const int8_t*)(x.at + tile * x.apart());
  const float *step_of = x.steps + (size_t)tile * x.blocks * 16, *sum_of = x.sums + (size_t)tile * x.blocks * 16;
  auto start = [&](int group) {
    if (group < x.blocks) dots_of(rows + group * 512, wide + group * 512, dots[group % (2 * AHEAD)]);
  };
  // Unrolled, because compilers (g++ 12) otherwise keep the sums in memory.
  __m512 sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
  written();
  for (int g = 0; g < AHEAD; g++) start(g);
  for (int g = 0; g < x.blocks; g++, step_of += 16, sum_of += 16, scales += 32) {
    start(g + AHEAD);
    const __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)scales));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales + 16)));
    const int32_t* of_group = dots[g % (2 * AHEAD)];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(of_group + r * 16)), _mm512_set1_ps(step_of[r]));
      sum[r] = _mm512_fmadd_ps(scaled, step, sum[r]);
      sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum_of[r]), least, sum[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) _mm512_store_ps(sums + r * 16, sum[r]);
}

// A pair of unpacked panels.
struct WidePair {
  const uint8_t* at[2];
  const uint16_t* scales[2];
};

template <class Pairs>
static WidePair widen_pair(const Pairs& pairs, int pair, int groups, uint8_t* to) {
  const Linear& l = pairs.l;
  const int first = pairs.panel(pair), last = (l.outputs + 15) / 16 - 1, two[] = {first, std::min(last, first + pairs.apart())};
  WidePair wide;
  for (int p = 0; p < 2; p++, to += (size_t)groups * 512) {
    widen_panel((const uint8_t*)l.weights + (size_t)two[p] * groups * 256, groups, to);
    wide.at[p] = to;
    wide.scales[p] = l.scales + (size_t)two[p] * groups * 32;
  }
  return wide;
}

template <class Pairs>
static void multiply_tile(const Pairs& pairs, const RowTiles& x, int tile, int pair, const WidePair& wide) {
  alignas(64) float sums[2 * 256];
  const int here = std::min(16, x.rows - tile * 16);
  for (int p = 0; p < 2; p++) {
    auto sum = here > 8 ? sum_groups<16> : here > 4 ? sum_groups<8> : sum_groups<4>;
    sum(x, tile, wide.at[p], wide.scales[p], sums + p * 256);
  }
  for (int r = 0; r < here; r++) pairs.template finish<Groups>(x, pair, tile * 16 + r, sums + r * 16);
}

constexpr int NEAR_WIDE = 512;  // KB of unpacked weights that stay in the L2 cache while all rows are multiplied

// Multiplies tiles of rows by pairs of panels; several pairs at a time are unpacked and used for all rows.
template <class Pairs>
static void multiply_groups(const Pairs& pairs, const RowTiles& x, Share tiles, Share some) {
  static thread_local TileMemory room;
  static thread_local std::vector<WidePair> wide;
  const int many = tiles.last - tiles.first > 1 ? std::max(1, NEAR_WIDE / x.blocks) : 1;
  const size_t each = (size_t)x.blocks * 1024;
  uint8_t* at = (uint8_t*)room.of(many * each / 2);
  configure_groups();
  for (int first = some.first; first < some.last; first += many) {
    const int here = std::min(many, some.last - first);
    wide.clear();
    for (int i = 0; i < here; i++) wide.push_back(widen_pair(pairs, first + i, x.blocks, at + i * each));
    for (int tile = tiles.first; tile < tiles.last; tile++)
      for (int i = 0; i < here; i++) multiply_tile(pairs, x, tile, first + i, wide[i]);
  }
  configure_tiles();
}
