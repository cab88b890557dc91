// Rows of activations cut into tiles, and what a thread takes of rows and outputs.
#pragma once
#include "parts.hpp"
#include "tiles.hpp"

static inline bool in_tiles(const Linear& l) { return l.format == BFLOAT16_PAIRS || l.format == INT8_FOURS; }

struct Share {
  int first, last;
};

static inline Share part_of(int count, int threads, int thread) {
  return {(int)((int64_t)count * thread / threads), (int)((int64_t)count * (thread + 1) / threads)};
}

// Rows in tiles: `per` rows each, `blocks` tiles side by side; of int8, the step of each row. Rows past the last hold
// anything: no other row sees them.
struct RowTiles {
  uint16_t* at;
  float* steps;
  int rows, per, blocks;

  int count() const { return (rows + per - 1) / per; }
  size_t apart() const { return (size_t)blocks * TILE; }
  Share rows_of(Share tiles) const { return {std::min(rows, tiles.first * per), std::min(rows, tiles.last * per)}; }
};

struct RowRoom {
  TileMemory tiles;
  std::vector<float> steps;

  RowTiles of(const Linear& l, int rows) {
    int depth = l.format == INT8_FOURS ? INT8_DEPTH : DEPTH, per = 16 / l.parts;
    RowTiles x{nullptr, nullptr, rows, per, (l.inputs + depth - 1) / depth};
    x.at = tiles.of(x.count() * x.apart());
    steps.resize(rows);
    x.steps = steps.data();
    return x;
  }
};

// Rows of a layer's inputs: `rows_at(row, space)` says where a row lies, which may be in `space`.
template <class From>
static void cut_rows(const Linear& l, From rows_at, const RowTiles& x, Share rows) {
  static thread_local std::vector<float> space;
  space.resize(l.inputs);
  for (int row = rows.first; row < rows.last; row++) {
    const float* from = rows_at(row, space.data());
    // A row of a tile has as many bytes in both types.
    uint16_t* to = x.at + row / x.per * x.apart() + row % x.per * l.parts * DEPTH;
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
