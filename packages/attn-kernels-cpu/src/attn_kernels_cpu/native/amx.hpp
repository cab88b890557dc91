// Products of rows in bfloat16 parts with panels of bfloat16 weights, by the tile registers of AMX.
// Every output is summed over its inputs in one fixed order, whatever the number of rows.
#pragma once
#include <omp.h>

#include "parts.hpp"
#include "registers.hpp"
#include "tiles.hpp"

constexpr int PAIR = 2 * 16;  // outputs of two panels

#ifdef TILE_REGISTERS
// One tile of rows, or two, with two panels: sums [tiles, 2, 16, 16].
template <int TILES>
static inline void pair_sums(const uint16_t* rows, size_t next, const uint16_t* panel, size_t other, int blocks,
                             float* sums) {
  written();
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
#else
template <int TILES>
static inline void pair_sums(const uint16_t*, size_t, const uint16_t*, size_t, int, float*) {}
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

// Neighbouring panels of a layer in twos, and where their sums go.
struct Neighbours {
  const Linear& l;
  Into to;

  int count() const { return (l.outputs + PAIR - 1) / PAIR; }
  int panel(int pair) const { return 2 * pair; }
  int apart() const { return 1; }
  void finish(int pair, int row, const float* sums) const {
    for (int p = 0; p < 2 && (2 * pair + p) * 16 < l.outputs; p++)
      ::finish(l, to, row, 2 * pair + p, whole(sums + p * 256, l.parts));
  }
};

// Panels of gates and of what they gate, [gates, others] in one layer: silu(gate) * other of each row goes to `out`.
struct Gated {
  const Linear& l;
  float* out;

  int count() const { return l.outputs / PAIR; }
  int panel(int pair) const { return pair; }
  int apart() const { return count(); }
  void finish(int pair, int row, const float* sums) const {
    __m512 gate = whole(sums, l.parts), up = whole(sums + 256, l.parts);
    if (l.bias) {
      gate = _mm512_add_ps(gate, _mm512_loadu_ps(l.bias + pair * 16));
      up = _mm512_add_ps(up, _mm512_loadu_ps(l.bias + (pair + apart()) * 16));
    }
    _mm512_storeu_ps(out + (size_t)row * (l.outputs / 2) + pair * 16, silu_gate(gate, up));
  }
};

template <class Pairs>
static inline void finish_tile(const Pairs& pairs, const RowTiles& x, int tile, int pair, const float* sums) {
  int first = tile * x.per, last = std::min(first + x.per, x.rows);
  for (int row = first; row < last; row++) pairs.finish(pair, row, sums + (row - first) * pairs.l.parts * 16);
}

// Tiles `first` to `last` - 1 of rows with two panels.
template <class Pairs>
static void multiply_pair(const Pairs& pairs, const RowTiles& x, int first, int last, int pair) {
  alignas(64) float sums[4 * 256];
  size_t row = (size_t)x.blocks * TILE, other = pairs.apart() * row;
  const uint16_t* weights = (const uint16_t*)pairs.l.weights + pairs.panel(pair) * row;
  int tile = first;
  for (; tile + 2 <= last; tile += 2) {
    pair_sums<2>(x.at + tile * row, row, weights, other, x.blocks, sums);
    finish_tile(pairs, x, tile, pair, sums);
    finish_tile(pairs, x, tile + 1, pair, sums + 512);
  }
  for (; tile < last; tile++) {
    pair_sums<1>(x.at + tile * row, row, weights, other, x.blocks, sums);
    finish_tile(pairs, x, tile, pair, sums);
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

template <class Pairs>
static void multiply_tiles(const Pairs& pairs, const float* x, int rows, int threads) {
  RowTiles tiled = tiles_of_rows(pairs.l, x, rows, threads);
  int tiles = (rows + tiled.per - 1) / tiled.per, many = std::max(2, NEAR_TILES / tiled.blocks / 2 * 2);
  int parts = (tiles + many - 1) / many, count = pairs.count();
  int share = parts == 1 ? (count + threads - 1) / threads : std::min(count, 4), shares = (count + share - 1) / share;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int task = 0; task < parts * shares; task++) {
    int tile = task / shares * many, first = task % shares * share;
    configure_tiles();
    for (int pair = first; pair < std::min(count, first + share); pair++)
      multiply_pair(pairs, tiled, tile, std::min(tiles, tile + many), pair);
    release_tiles();
  }
}
