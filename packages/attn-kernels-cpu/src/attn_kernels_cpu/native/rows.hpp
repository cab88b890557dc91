// Rows of activations cut into tiles, and what a thread takes of rows and outputs.
#pragma once
#include "parts.hpp"
#include "tiles.hpp"

// Rows in tiles: `per` rows each, `blocks` side by side, each of which is `bytes`: a tile, or one for each bfloat16 number
// that an input becomes. Of int8 weights the step of each row; of int4, whose tiles are half as deep, steps and sums
// [tiles, blocks, 16]. Rows past the last hold anything: no other row sees them.
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

// A row of floats in groups of int8, as row `row` of tiles.
static inline void cut_groups(const float* from, const RowTiles& x, int row) {
  int32_t unused;
  size_t tile = (size_t)row / 16 * x.blocks;
  for (int g = 0; g < x.blocks; g++) {
    size_t at = (tile + g) * 16 + row % 16;
    quantise_group(from + g * GROUP, (int8_t*)x.at + at * GROUP, x.steps + at, x.sums + at, &unused);
  }
}

// Rows of a layer's inputs: `rows_at(row, space)` says where a row lies, which may be in `space`.
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
    // A row of a tile has as many bytes in both types.
    uint16_t* to = x.at + row / x.per * x.apart() + row % x.per * (16 / x.per) * DEPTH;
    if (l.format == INT8_FOURS)
      x.steps[row] = whole_row(from, l.inputs, (uint8_t*)to);
    else
      split_row(from, l.inputs, l.parts, to);
  }
}

// Rows of `width` floats that lie one after another.
static inline auto side_by_side(const float* x, size_t width) {
  return [=](int row, float*) { return x + row * width; };
}
