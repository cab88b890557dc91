// Products of rows in bfloat16 or int8 parts with panels of such weights, by the tile registers of AMX.
// Every output is summed over its inputs in one fixed order, whatever the number of rows.
#pragma once
#include <omp.h>

#include <type_traits>

#include "groups.hpp"

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

// One tile of rows, or two, with two panels: sums [tiles, 2, 16, 16]. Tiles of any type are 1 KB. `between` is done
// `blocks` times, while the registers multiply.
template <class Dots, int TILES, class Between>
static inline void sums_of(const uint16_t* rows, size_t next, const uint16_t* panel, size_t other, int blocks, float* sums,
                           Between between) {
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
    between();
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
template <class Dots, int TILES, class Between>
static inline void sums_of(const uint16_t*, size_t, const uint16_t*, size_t, int, float*, Between) {}
#endif

// Sums of up to two tiles of rows with two panels, which are finished while the next are being multiplied.
template <class Parts, class Pairs>
struct Unfinished {
  const Pairs& pairs;
  const RowTiles& x;
  const float* sums = nullptr;
  int pair = 0, row = 0, rows = 0, done = 0;

  void take(const float* those, int of_pair, int tile) {
    sums = those;
    pair = of_pair;
    row = tile * x.per;
    rows = std::min(2 * x.per, x.rows - row);
    done = 0;
  }

  void some(int many) {
    constexpr int PER = 16 / Parts::PARTS;
    for (int last = std::min(rows, done + many); done < last; done++)
      pairs.template finish<Parts>(x, pair, row + done, sums + done / PER * 512 + done % PER * Parts::PARTS * 16);
  }
};

constexpr int NEAR_TILES = 640;  // tiles of weights (1 KB each) that stay in the second cache while rows pass by

// Tiles of rows with pairs of panels.
template <class Parts, class Pairs>
static void multiply_share(const Pairs& pairs, const RowTiles& x, Share tiles, Share some) {
  alignas(64) float sums[2][4 * 256];
  const size_t row = x.apart(), other = pairs.apart() * row;
  const uint16_t* weights = (const uint16_t*)pairs.l.weights;
  const int many = std::max(1, NEAR_TILES / (2 * x.blocks)), each = (2 * x.per + x.blocks - 1) / x.blocks;
  Unfinished<Parts, Pairs> left{pairs, x};
  auto between = [&] { left.some(each); };
  int turn = 0;
  for (int first = some.first; first < some.last; first += many)
    for (int tile = tiles.first; tile < tiles.last; tile += 2)
      for (int pair = first; pair < std::min(some.last, first + many); pair++, turn ^= 1) {
        const uint16_t *from = x.at + tile * row, *panel = weights + pairs.panel(pair) * row;
        if (tile + 1 < tiles.last)
          sums_of<typename Parts::Dots, 2>(from, row, panel, other, x.blocks, sums[turn], between);
        else
          sums_of<typename Parts::Dots, 1>(from, row, panel, other, x.blocks, sums[turn], between);
        left.take(sums[turn], pair, tile);
      }
  left.some(2 * x.per);
}

// The threads that share products out among them: by rows where there are many, so that a thread's rows stay in its cache
// from one product to the next, else by outputs, so that weights are read once.
struct Team {
  int threads, thread;
  bool by_rows;

  static constexpr int MANY = 8;  // tiles of rows for each thread

  static bool rows_enough(const RowTiles& x, int threads) { return threads == 1 || x.count() >= MANY * threads; }

  // Tiles come in twos, but for the last.
  Share tiles(const RowTiles& x) const {
    if (!by_rows) return {0, x.count()};
    Share twos = part_of((x.count() + 1) / 2, threads, thread);
    return {2 * twos.first, std::min(x.count(), 2 * twos.last)};
  }
  Share pairs(int count) const { return by_rows ? Share{0, count} : part_of(count, threads, thread); }
  // Rows that a thread works on one by one.
  Share rows(const RowTiles& x) const { return by_rows ? x.rows_of(tiles(x)) : part_of(x.rows, threads, thread); }

  // Until all have come here, where a thread needs what others made.
  void meet() const {
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
    team.meet();
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
