// The index of the largest output of each row, found while panels are multiplied: only a few outputs are stored at a
// time.
#pragma once
#include "linear.hpp"

// The first index of the value `largest` among `count` outputs.
static inline int first_place(const float* outputs, int count, float largest) {
  for (int i = 0; i < count; i += 16) {
    // Lanes past the last are NaN, which equals nothing.
    Floats values = load_some(outputs + i, count - i, all(std::numeric_limits<float>::quiet_NaN()));
    if (uint32_t hits = equal_lanes(values, all(largest))) return i + __builtin_ctz(hits);
  }
  return -1;
}

// The largest output of a row so far and its first index; NaN as soon as one output is NaN.
struct Leader {
  float value = -std::numeric_limits<float>::infinity();
  int64_t place = -1;

  // Updates the maximum with the next `count` outputs, which begin at index `first`.
  void update(const float* outputs, int count, int64_t first) {
    Floats most = all(value);
    uint32_t missing = 0;
    for (int i = 0; i < count; i += 16) {
      Floats values = load_some(outputs + i, count - i, most);
      missing |= nan_lanes(values);
      most = larger(most, values);
    }
    float largest = missing ? std::numeric_limits<float>::quiet_NaN() : largest_of(most);
    if (!(largest <= value)) merge({largest, first + first_place(outputs, count, largest)});
  }

  void merge(const Leader& later) {
    if (std::isnan(later.value) || later.value > value) *this = later;
  }

  // The index, or -1 if the maximum is NaN or infinite.
  int64_t finite_place() const { return std::isfinite(value) ? place : -1; }
};

constexpr int NEAR_PANELS = 2048;  // outputs of rows with a panel (64 bytes each) that stay in the L2 cache

// `product(layer, into)` multiplies all rows on the calling thread. Panels are processed in pairs.
template <class Product>
static void find_largest(const Linear& l, int rows, int64_t* places, int threads, Product product) {
  const int twos = (l.outputs + PAIR - 1) / PAIR, many = std::max(1, NEAR_PANELS / 2 / std::max(1, rows));
  std::vector<std::vector<Leader>> found(threads, std::vector<Leader>(rows));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> outputs;
    std::vector<Leader>& leaders = found[omp_get_thread_num()];
    const Share mine = part_of(twos, omp_get_num_threads(), omp_get_thread_num());
    const size_t stride = (size_t)std::min(many, mine.last - mine.first) * PAIR;
    outputs.resize(rows * stride);
    for (int first = mine.first; first < mine.last; first += many) {
      const Linear some = some_panels(l, 2 * first, 2 * std::min(mine.last, first + many));
      product(some, Into{outputs.data(), stride, false});
      for (int r = 0; r < rows; r++) leaders[r].update(outputs.data() + r * stride, some.outputs, (int64_t)first * PAIR);
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int t = 1; t < threads; t++) found[0][r].merge(found[t][r]);
    places[r] = found[0][r].finite_place();
  }
}

template <class Tiles>
static void find_largest(const Linear& l, typename Tiles::Input x, int rows, int64_t* places, int threads) {
  find_largest(l, rows, places, threads, [&](const Linear& some, Into to) {
    block<Tiles>(some, x, rows, 0, (some.outputs + 15) / 16, to);
  });
}

#ifdef TILE_REGISTERS
template <class Parts>
static void find_largest(const Linear& l, const RowTiles& x, int64_t* places, int threads) {
  find_largest(l, x.rows, places, threads, [&](const Linear& some, Into to) {
    configure_tiles();
    Team{1, 0, true}.multiply<Parts>(Neighbours{some, to}, x);
    release_tiles();
  });
}

static void find_largest_in_tiles(const Linear& l, const float* x, int rows, int64_t* places, int threads) {
  static thread_local RowRoom room;
  const RowTiles tiled = room.of(l, rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
  cut_rows(l, side_by_side(x, l.inputs), tiled, part_of(rows, omp_get_num_threads(), omp_get_thread_num()));
  if (l.format == INT4) return find_largest<Groups>(l, tiled, places, threads);
  if (l.parts == OnePart::PARTS) return find_largest<OnePart>(l, tiled, places, threads);
  if (l.parts == ThreeParts::PARTS) return find_largest<ThreeParts>(l, tiled, places, threads);
  find_largest<WholeNumbers>(l, tiled, places, threads);
}
#endif

static void find_largest(const Linear& l, const float* x, int rows, int64_t* places, int threads) {
#ifdef TILE_REGISTERS
  if (in_tiles(l) && enough_rows(l, rows)) return find_largest_in_tiles(l, x, rows, places, threads);
#endif
  with_tiles(l, x, rows, threads,
             [&](auto tiles, auto from) { find_largest<decltype(tiles)>(l, from, rows, places, threads); });
}
