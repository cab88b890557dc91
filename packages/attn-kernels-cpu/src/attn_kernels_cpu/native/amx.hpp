// Products of rows that are split into bfloat16 or int8 parts with panels of such weights, in the tile registers of
// AMX. Every output is summed over its inputs in one fixed order, whatever the number of rows.
#pragma once
#include <omp.h>

#include <type_traits>

#include "groups.hpp"

struct Bfloat16Dots {};
struct Int8Dots {};

// A macro, because the register numbers must be literals.
#define ADD_DOTS(TO, ROWS, PANEL)                                \
  if constexpr (std::is_same_v<Dots, Int8Dots>)                  \
    _tile_dpbssd(TO, ROWS, PANEL);                               \
  else                                                           \
    _tile_dpbf16ps(TO, ROWS, PANEL)

// The products of two tiles of rows with two panels: sums [tiles, panels, 16, 16]. Tiles of any dtype are 1 KB; DEEP
// tiles of rows are multiplied by one of a panel. `between` is called `blocks` times while the registers multiply.
template <class Dots, int DEEP, class Between>
static inline void sums_of_two(const uint16_t* rows, size_t next, const uint16_t* panel, size_t other, int blocks, float* sums,
                               Between between) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < blocks; k++, panel += TILE) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + other, 64);
#pragma GCC unroll 3
    for (int part = 0; part < DEEP; part++, rows += TILE) {
      _tile_loadd(4, rows, 64);
      _tile_loadd(5, rows + next, 64);
      ADD_DOTS(0, 4, 6);
      ADD_DOTS(1, 4, 7);
      ADD_DOTS(2, 5, 6);
      ADD_DOTS(3, 5, 7);
    }
    between();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// The products of one tile of rows with two panels: sums [panels, 16, 16].
template <class Dots, int DEEP, class Between>
static inline void sums_of_one(const uint16_t* rows, const uint16_t* panel, size_t other, int blocks, float* sums,
                               Between between) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  for (int k = 0; k < blocks; k++, panel += TILE) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + other, 64);
#pragma GCC unroll 3
    for (int part = 0; part < DEEP; part++, rows += TILE) {
      _tile_loadd(4, rows, 64);
      ADD_DOTS(0, 4, 6);
      ADD_DOTS(1, 4, 7);
    }
    between();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
}
#undef ADD_DOTS

// The rows of one tile and a pair of panels.
struct Place {
  int pair, row, rows;
};

// The sums of up to two places, each a tile of rows and a pair of panels, which are finished (scaled and stored) while
// the next ones are being multiplied.
template <class Parts, class Pairs>
struct Unfinished {
  const Pairs& pairs;
  const RowTiles& x;
  const float* sums = nullptr;
  Place places[2] = {};
  int count = 0, place = 0, done = 0;

  void take(const float* those, Place first, Place second) {
    sums = those;
    places[0] = first;
    places[1] = second;
    count = second.rows > 0 ? 2 : 1;
    place = done = 0;
  }

  void some(int many) {
    for (; many > 0 && place < count; many--) {
      const Place& at = places[place];
      pairs.template finish<Parts>(x, at.pair, at.row + done, sums + place * 512 + done * Parts::ROWS * 16);
      if (++done < at.rows) continue;
      place++;
      done = 0;
    }
  }
};

constexpr int NEAR_TILES = 640;  // tiles of weights (1 KB each) that stay in the L2 cache while all rows are multiplied

// Multiplies tiles of rows by pairs of panels, two tiles at a time, and a last tile alone.
template <class Parts, class Pairs>
static void multiply_share(const Pairs& pairs, const RowTiles& x, Share tiles, Share some) {
  if (x.rows == 0) return;  // registers cannot be configured with zero rows
  using Dots = typename Parts::Dots;
  constexpr int DEEP = Parts::PARTS / Parts::ROWS;
  alignas(64) float sums[2][4 * 256];
  const size_t row = x.apart(), apart = (size_t)x.blocks * TILE, other = pairs.apart() * apart;
  const uint16_t* weights = (const uint16_t*)pairs.l.weights;
  const int many = std::max(1, NEAR_TILES / (2 * x.blocks)), each = (2 * x.per + x.blocks - 1) / x.blocks;
  Unfinished<Parts, Pairs> left{pairs, x};
  auto between = [&] { left.some(each); };
  auto place = [&](int pair, int tile) { return Place{pair, tile * x.per, std::min(x.per, x.rows - tile * x.per)}; };
  int buffer = 0;
  const bool partial = x.rows < x.per;
  if (partial) configure_rows(x.rows * Parts::ROWS);
  for (int first = some.first; first < some.last; first += many) {
    const int last = std::min(some.last, first + many);
    for (int tile = tiles.first; tile < tiles.last; tile += 2) {
      const uint16_t* from = x.at + tile * row;
      const bool two = tile + 1 < tiles.last;
      for (int pair = first; pair < last; pair++, buffer ^= 1) {
        const uint16_t* panel = weights + pairs.panel(pair) * apart;
        if (two) {
          sums_of_two<Dots, DEEP>(from, row, panel, other, x.blocks, sums[buffer], between);
          left.take(sums[buffer], place(pair, tile), place(pair, tile + 1));
        } else {
          sums_of_one<Dots, DEEP>(from, panel, other, x.blocks, sums[buffer], between);
          left.take(sums[buffer], place(pair, tile), {});
        }
      }
    }
  }
  left.some(2 * x.per);
  if (partial) configure_tiles();
}

// The division of products among threads: by rows if there are many, so that a thread's rows stay in its cache from one
// product to the next, else by outputs, so that weights are read once.
struct Team {
  int threads, thread;
  bool by_rows;

  static constexpr int MANY = 8;  // the fewest tiles of rows per thread for a division by rows

  static bool rows_enough(const RowTiles& x, int threads) { return threads == 1 || x.count() >= MANY * threads; }

  // Tiles are assigned in pairs, except for a last one.
  Share tiles(const RowTiles& x) const {
    if (!by_rows) return {0, x.count()};
    Share twos = part_of((x.count() + 1) / 2, threads, thread);
    return {2 * twos.first, std::min(x.count(), 2 * twos.last)};
  }
  Share pairs(int count) const { return by_rows ? Share{0, count} : part_of(count, threads, thread); }
  // The rows that this thread processes one by one.
  Share rows(const RowTiles& x) const { return by_rows ? x.rows_of(tiles(x)) : part_of(x.rows, threads, thread); }

  // A barrier, if this thread needs results of other threads.
  void synchronize() const {
    if (by_rows) return;
#pragma omp barrier
  }

  template <class Parts, class Pairs>
  void multiply(const Pairs& pairs_of, const RowTiles& x) const {
    Share rows = tiles(x), panels = pairs(pairs_of.count());
    if constexpr (std::is_same_v<Parts, Groups>)
      multiply_groups(pairs_of, x, rows, panels);
    else
      multiply_share<Parts>(pairs_of, x, rows, panels);
  }
};

template <class Parts>
static void multiply_tiles(const Linear& l, const float* x, int rows, Into to, int threads) {
  static thread_local RowRoom room;
  const RowTiles tiled = room.of(l, rows);
  const bool by_rows = Team::rows_enough(tiled, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Team team{omp_get_num_threads(), omp_get_thread_num(), by_rows};
    cut_rows(l, side_by_side(x, l.inputs), tiled, team.rows(tiled));
    team.synchronize();
    configure_tiles();
    team.multiply<Parts>(Neighbours{l, to}, tiled);
    release_tiles();
  }
}

static void multiply_tiles(const Linear& l, const float* x, int rows, Into to, int threads) {
  if (l.format == INT4) return multiply_tiles<Groups>(l, x, rows, to, threads);
  if (l.parts == OnePart::PARTS) return multiply_tiles<OnePart>(l, x, rows, to, threads);
  if (l.parts == ThreeParts::PARTS) return multiply_tiles<ThreeParts>(l, x, rows, to, threads);
  multiply_tiles<WholeNumbers>(l, x, rows, to, threads);
}
