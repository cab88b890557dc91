// Products of rows in bfloat16 or int8 parts with panels of such weights, by the tile registers of AMX.
// Every output is summed over its inputs in one fixed order, whatever the number of rows.
#pragma once
#include <omp.h>

#include "parts.hpp"
#include "registers.hpp"
#include "tiles.hpp"

constexpr int PAIR = 2 * 16;  // outputs of two panels

static inline bool in_tiles(const Linear& l) { return l.format == BFLOAT16_PAIRS || l.format == INT8_FOURS; }

#ifdef TILE_REGISTERS
struct Bfloat16Dots {
  static void zero_zero() { _tile_dpbf16ps(0, 4, 6); }
  static void zero_one() { _tile_dpbf16ps(1, 4, 7); }
  static void one_zero() { _tile_dpbf16ps(2, 5, 6); }
  static void one_one() { _tile_dpbf16ps(3, 5, 7); }
};

struct Int8Dots {
  static void zero_zero() { _tile_dpbssd(0, 4, 6); }
  static void zero_one() { _tile_dpbssd(1, 4, 7); }
  static void one_zero() { _tile_dpbssd(2, 5, 6); }
  static void one_one() { _tile_dpbssd(3, 5, 7); }
};

// One tile of rows, or two, with two panels: sums [tiles, 2, 16, 16]. Tiles of any type are 1 KB.
template <class Dots, int TILES>
static inline void sums_of(const uint16_t* rows, size_t next, const uint16_t* panel, size_t other, int blocks, float* sums) {
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
    Dots::zero_zero();
    Dots::zero_one();
    if (TILES == 2) {
      _tile_loadd(5, rows + next + k * TILE, 64);
      Dots::one_zero();
      Dots::one_one();
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
struct Bfloat16Dots {};
struct Int8Dots {};
template <class Dots, int TILES>
static inline void sums_of(const uint16_t*, size_t, const uint16_t*, size_t, int, float*) {}
#endif

// Rows of one layer in tiles: `per` rows each, `blocks` tiles side by side; of int8, the step of each row.
struct RowTiles {
  const uint16_t* at;
  const float* steps;
  int rows, per, blocks;
};

// What the parts of a row add up to, by the form of both sides.
struct OnePart {
  using Dots = Bfloat16Dots;
  static constexpr int PARTS = 1;
  static __m512 whole(const RowTiles&, int, const float* sums, __m512) { return _mm512_load_ps(sums); }
};

struct ThreeParts {
  using Dots = Bfloat16Dots;
  static constexpr int PARTS = 3;
  static __m512 whole(const RowTiles&, int, const float* sums, __m512) {
    return _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(_mm512_load_ps(sums + 16), _mm512_load_ps(sums + 32)));
  }
};

struct WholeNumbers {
  using Dots = Int8Dots;
  static constexpr int PARTS = 2;
  static __m512 whole(const RowTiles& x, int row, const float* sums, __m512 steps) {
    __m512 upper = _mm512_cvtepi32_ps(_mm512_load_si512(sums)), lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 16));
    __m512 dots = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
    return _mm512_mul_ps(_mm512_mul_ps(dots, _mm512_set1_ps(x.steps[row])), steps);
  }
};

static inline __m512 of_panel(const float* values, int panel) {
  return values ? _mm512_loadu_ps(values + panel * 16) : _mm512_setzero_ps();
}

// Neighbouring panels of a layer in twos, and where their sums go.
struct Neighbours {
  const Linear& l;
  Into to;

  int count() const { return (l.outputs + PAIR - 1) / PAIR; }
  int panel(int pair) const { return 2 * pair; }
  int apart() const { return 1; }

  // Rows `first` to `last` - 1, whose sums lie in one tile.
  template <class Parts>
  void finish(const RowTiles& x, int pair, int first, int last, const float* sums) const {
    for (int p = 0; p < 2 && (2 * pair + p) * 16 < l.outputs; p++, sums += 256) {
      int panel = 2 * pair + p, left = l.outputs - panel * 16;
      const __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
      const __m512 bias = of_panel(l.bias, panel), steps = of_panel(l.steps, panel);
      float* at = to.out + first * to.stride + panel * 16;
      for (int row = first; row < last; row++, at += to.stride) {
        __m512 value = Parts::whole(x, row, sums + (row - first) * Parts::PARTS * 16, steps);
        if (l.bias) value = _mm512_add_ps(value, bias);
        if (to.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, at));
        _mm512_mask_storeu_ps(at, mask, value);
      }
    }
  }
};

// Panels of gates and of what they gate, [gates, others] in one layer: silu(gate) * other of each row goes to `out`.
struct Gated {
  const Linear& l;
  float* out;

  int count() const { return l.outputs / PAIR; }
  int panel(int pair) const { return pair; }
  int apart() const { return count(); }

  template <class Parts>
  void finish(const RowTiles& x, int pair, int first, int last, const float* sums) const {
    const int width = l.outputs / 2, other = pair + apart();
    const __m512 biases[2] = {of_panel(l.bias, pair), of_panel(l.bias, other)};
    const __m512 steps[2] = {of_panel(l.steps, pair), of_panel(l.steps, other)};
    float* at = out + (size_t)first * width + pair * 16;
    for (int row = first; row < last; row++, at += width, sums += Parts::PARTS * 16) {
      __m512 gate = Parts::whole(x, row, sums, steps[0]), up = Parts::whole(x, row, sums + 256, steps[1]);
      if (l.bias) {
        gate = _mm512_add_ps(gate, biases[0]);
        up = _mm512_add_ps(up, biases[1]);
      }
      _mm512_storeu_ps(at, silu_gate(gate, up));
    }
  }
};

// Tiles `first` to `last` - 1 of rows with two panels.
template <class Parts, class Pairs>
static void multiply_pair(const Pairs& pairs, const RowTiles& x, int first, int last, int pair) {
  alignas(64) float sums[4 * 256];
  size_t row = (size_t)x.blocks * TILE, other = pairs.apart() * row;
  const uint16_t* weights = (const uint16_t*)pairs.l.weights + pairs.panel(pair) * row;
  auto finish = [&](int tile, const float* own) {
    pairs.template finish<Parts>(x, pair, tile * x.per, std::min((tile + 1) * x.per, x.rows), own);
  };
  int tile = first;
  for (; tile + 2 <= last; tile += 2) {
    sums_of<typename Parts::Dots, 2>(x.at + tile * row, row, weights, other, x.blocks, sums);
    finish(tile, sums);
    finish(tile + 1, sums + 512);
  }
  for (; tile < last; tile++) {
    sums_of<typename Parts::Dots, 1>(x.at + tile * row, row, weights, other, x.blocks, sums);
    finish(tile, sums);
  }
}

// `rows` in tiles, made from floats: `rows_at(row, space)` says where a row lies, which may be in `space`.
template <class From>
static RowTiles tiles_of_rows(const Linear& l, From rows_at, int rows, int threads) {
  static thread_local TileMemory room;
  static thread_local std::vector<float> row_steps;
  bool int8 = l.format == INT8_FOURS;
  int per = 16 / l.parts, depth = int8 ? INT8_DEPTH : DEPTH;
  int blocks = (l.inputs + depth - 1) / depth, tiles = (rows + per - 1) / per;
  size_t row = (size_t)blocks * TILE;
  row_steps.resize(rows);
  uint16_t* at = room.of(tiles * row);
  float* steps = row_steps.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tiles > 1)
  for (int t = 0; t < tiles; t++) {
    static thread_local std::vector<float> space;
    space.resize(l.inputs);
    int here = std::min(per, rows - t * per);
    if (here * l.parts < 16) std::memset(at + t * row, 0, row * 2);
    for (int r = 0; r < here; r++) {
      const float* from = rows_at(t * per + r, space.data());
      uint16_t* to = at + t * row + r * l.parts * DEPTH;  // a row of a tile has as many bytes in both types
      if (int8)
        steps[t * per + r] = whole_row(from, l.inputs, (uint8_t*)to);
      else
        split_row(from, l.inputs, l.parts, to);
    }
  }
  return {at, steps, rows, per, blocks};
}

constexpr int NEAR_TILES = 768;  // tiles of rows (1 KB each) that stay in the second cache while panels pass by

template <class Parts, class Pairs>
static void multiply_parts(const Pairs& pairs, const RowTiles& x, int threads) {
  int tiles = (x.rows + x.per - 1) / x.per, many = std::max(2, NEAR_TILES / x.blocks / 2 * 2);
  int parts = (tiles + many - 1) / many, count = pairs.count();
  int share = parts == 1 ? (count + threads - 1) / threads : std::min(count, 4), shares = (count + share - 1) / share;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int task = 0; task < parts * shares; task++) {
    int tile = task / shares * many, first = task % shares * share;
    configure_tiles();
    for (int pair = first; pair < std::min(count, first + share); pair++)
      multiply_pair<Parts>(pairs, x, tile, std::min(tiles, tile + many), pair);
    release_tiles();
  }
}

template <class Pairs, class From>
static void multiply_tiles(const Pairs& pairs, From from, int rows, int threads) {
  RowTiles tiled = tiles_of_rows(pairs.l, from, rows, threads);
  if (pairs.l.parts == OnePart::PARTS) return multiply_parts<OnePart>(pairs, tiled, threads);
  if (pairs.l.parts == ThreeParts::PARTS) return multiply_parts<ThreeParts>(pairs, tiled, threads);
  multiply_parts<WholeNumbers>(pairs, tiled, threads);
}
