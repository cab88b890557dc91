// Products of rows in bfloat16 parts with panels of bfloat16 weights, by the tile registers of AMX.
// Every output is summed over its inputs in one fixed order, whatever the number of rows.
#pragma once
#include <omp.h>

#include "parts.hpp"
#include "tiles.hpp"

constexpr int PAIR = 2 * 16;  // outputs of two panels

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use the registers: it has to be asked once.
static bool tiles_allowed() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
}

// All eight registers hold sixteen rows of 64 bytes.
static inline void configure_tiles() {
  alignas(64) static constexpr struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

// One tile of rows, or two, with two panels: sums [tiles, 2, 16, 16].
template <int TILES>
static inline void pair_sums(const uint16_t* rows, size_t next, const uint16_t* panel, size_t other, int blocks,
                             float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < blocks; k++) {
    _tile_loadd(4, rows + k * TILE, 64);
    _tile_loadd(6, panel + k * TILE, 64);
    _tile_loadd(7, panel + other + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TILES == 2) {
      _tile_loadd(5, rows + next + k * TILE, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (TILES == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}
static inline void release_tiles() { _tile_release(); }
#else
static bool tiles_allowed() { return false; }
static inline void configure_tiles() {}
template <int TILES>
static inline void pair_sums(const uint16_t*, size_t, const uint16_t*, size_t, int, float*) {}
static inline void release_tiles() {}
#endif

static inline __m512 whole(const float* sums, int parts) {
  __m512 first = _mm512_load_ps(sums);
  if (parts == 1) return first;
  return _mm512_add_ps(first, _mm512_add_ps(_mm512_load_ps(sums + 16), _mm512_load_ps(sums + 32)));
}

// Rows of one layer in tiles: `per` rows each, `blocks` tiles side by side.
struct RowTiles {
  const uint16_t* at;
  int rows, per, blocks;
};

static inline void finish_tile(const Linear& l, const RowTiles& x, int tile, int panel, const float* sums, Into to) {
  int first = tile * x.per, last = std::min(first + x.per, x.rows);
  for (int p = 0; p < 2 && (panel + p) * 16 < l.outputs; p++)
    for (int row = first; row < last; row++)
      finish(l, to, row, panel + p, whole(sums + p * 256 + (row - first) * l.parts * 16, l.parts));
}

// Tiles `first` to `last` - 1 of rows with two panels.
static void multiply_pair(const Linear& l, const RowTiles& x, int first, int last, int panel, Into to) {
  alignas(64) float sums[4 * 256];
  size_t row = (size_t)x.blocks * TILE;
  const uint16_t* weights = (const uint16_t*)l.weights + panel * row;
  int tile = first;
  for (; tile + 2 <= last; tile += 2) {
    pair_sums<2>(x.at + tile * row, row, weights, row, x.blocks, sums);
    finish_tile(l, x, tile, panel, sums, to);
    finish_tile(l, x, tile + 1, panel, sums + 512, to);
  }
  for (; tile < last; tile++) {
    pair_sums<1>(x.at + tile * row, row, weights, row, x.blocks, sums);
    finish_tile(l, x, tile, panel, sums, to);
  }
}

// `rows` in tiles, made from floats.
static RowTiles tiles_of_rows(const Linear& l, const float* x, int rows, int threads) {
  static thread_local std::vector<uint16_t> room;
  int per = 16 / l.parts, blocks = (l.inputs + DEPTH - 1) / DEPTH, tiles = (rows + per - 1) / per;
  size_t row = (size_t)blocks * TILE;
  room.resize(tiles * row + 32);
  uint16_t* at = (uint16_t*)(((uintptr_t)room.data() + 63) / 64 * 64);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tiles > 1)
  for (int t = 0; t < tiles; t++) {
    int here = std::min(per, rows - t * per);
    if (here * l.parts < 16) std::memset(at + t * row, 0, row * 2);
    for (int r = 0; r < here; r++)
      split_row(x + (size_t)(t * per + r) * l.inputs, l.inputs, l.parts, at + t * row + r * l.parts * DEPTH);
  }
  return {at, rows, per, blocks};
}

constexpr int NEAR_TILES = 768;  // tiles of rows (1 KB each) that stay in the second cache while panels pass by

static void multiply_tiles(const Linear& l, const float* x, int rows, Into to, int threads) {
  RowTiles tiled = tiles_of_rows(l, x, rows, threads);
  int tiles = (rows + tiled.per - 1) / tiled.per, many = std::max(2, NEAR_TILES / tiled.blocks / 2 * 2);
  int parts = (tiles + many - 1) / many, pairs = (l.outputs + PAIR - 1) / PAIR;
  int share = parts == 1 ? (pairs + threads - 1) / threads : std::min(pairs, 4), shares = (pairs + share - 1) / share;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int task = 0; task < parts * shares; task++) {
    int tile = task / shares * many, first = task % shares * share;
    configure_tiles();
    for (int pair = first; pair < std::min(pairs, first + share); pair++)
      multiply_pair(l, tiled, tile, std::min(tiles, tile + many), 2 * pair, to);
    release_tiles();
  }
}
