// Rows of activations, laid out in AMX tiles.
#pragma once
#include "parts.hpp"
#include "tiles.hpp"

// Rows in tiles of `per` rows. The inputs are divided into `blocks` of `bytes`, each of one tile, or of one tile for
// each bfloat16 number that an input is split into. `steps` are those of each row for int8 weights; for int4 weights,
// whose tiles are half as deep, `steps` and `sums` are [tiles, blocks, 16]. Rows past the last are undefined: no other
// row uses them.
struct RowTiles {
  uint16_t* at;
  float *steps, *sums;
  int rows, per, blocks, bytes;

  int count() const { return (rows + per - 1) / per; }
  size_t apart() const { return (size_t)blocks * bytes / 2; }
  int deep() const { return bytes / (2 * TILE); }
  Share rows_of(Share tiles) const { return {std::min(rows, tiles.first * per), std::min(rows, tiles.last * per)}; }
};

struct RowRoom {
  TileMemory tiles;
  std::vector<float> steps, sums;

  RowTiles of(const Linear& l, int rows) {
    const bool whole = l.format == INT8_FOURS;
    int depth = whole ? INT8_DEPTH : DEPTH, per = whole ? 16 / l.parts : 16;
    int bytes = l.format == INT4 ? TILE : whole ? 2 * TILE : 2 * TILE * l.parts;
    RowTiles x{nullptr, nullptr, nullptr, rows, per, (l.inputs + depth - 1) / depth, bytes};
    x.at = tiles.of(x.count() * x.apart());
    steps.resize((size_t)x.count() * 16 * x.blocks);
    sums.resize(l.format == INT4 ? steps.size() : 0);
    x.steps = steps.data();
    x.sums = sums.data();
    return x;
  }
};

// Quantizes a row of floats in groups to int8, as row `row` of the tiles.
static inline void cut_groups(const float* from, const RowTiles& x, int row) {
  int32_t unused;
  size_t tile = (size_t)row / 16 * x.blocks;
  for (int g = 0; g < x.blocks; g++) {
    size_t at = (tile + g) * 16 + row % 16;
    quantise_group(from + g * GROUP, (int8_t*)x.at + at * GROUP, x.steps + at, x.sums + at, &unused);
  }
}

// Lays out rows of a layer's inputs in tiles: `rows_at(row, space)` returns the address of a row, which may be `space`.
template <class From>
static void cut_rows(const Linear& l, From rows_at, const RowTiles& x, Share rows) {
  static thread_local std::vector<float> space;
  space.resize(l.inputs);
  for (int row = rows.first; row < rows.last; row++) {
    const float* from = rows_at(row, space.data());
    if (l.format == INT4) {
      cut_groups(from, x, row);
      continue;
    }
    // A row of a tile has the same number of bytes in int8 and bfloat16.
    uint16_t* to = x.at + row / x.per * x.apart() + row % x.per * (16 / x.per) * DEPTH;
    if (l.format == INT8_FOURS)
      x.steps[row] = whole_row(from, l.inputs, (uint8_t*)to);
    else
      split_row(from, l.inputs, l.parts, to);
  }
}

// The addresses of contiguous rows of `width` floats, for `cut_rows`.
static inline auto side_by_side(const float* x, size_t width) {
  return [=](int row, float*) { return x + row * width; };
}
