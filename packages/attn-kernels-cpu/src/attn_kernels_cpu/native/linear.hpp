// Whole linear layers: panels are distributed to threads, and rows are processed in tiles.
#pragma once
#include <omp.h>

#include "int16.hpp"
#ifdef TILE_REGISTERS
#include "amx.hpp"
#endif

// What tiles are by default; `near` are the bytes of rows that stay in the cache while all panels are multiplied.
struct AnyTiles {
  static constexpr bool WIDENED = false;  // whether codes are unpacked into `Wider` for many rows
  static constexpr int NEAR = 384 * 1024;
};

template <class Element>
struct FloatTiles : AnyTiles {
  using Input = const float*;
  template <int ROWS, int PANELS>
  static void run(const Linear& l, Input x, int row, int panel, Into to) {
    float_tile<ROWS, PANELS, Element>(l, x, row, panel, to);
  }
  static Input from(const Linear& l, Input x, int row) { return x + (size_t)row * l.inputs; }
  static constexpr int MANY = Shape::FLOAT_ROWS, BYTES = 4, PANELS_OF_ONE = Shape::PANELS_OF_ONE;
};

struct Int8Tiles : AnyTiles {
  using Input = QuantisedRows;
  template <int ROWS, int PANELS>
  static void run(const Linear& l, Input x, int row, int panel, Into to) {
    int8_tile<ROWS, PANELS>(l, x, row, panel, to);
  }
  static Input from(const Linear& l, Input x, int row) { return x.from(row, l.inputs); }
  static constexpr int MANY = Shape::INT_ROWS, BYTES = 1, PANELS_OF_ONE = Shape::INT_PANELS_OF_ONE;
};

template <class Of>
struct NibbleTiles : AnyTiles {
  using Input = QuantisedRows;
  template <int ROWS, int PANELS>
  static void run(const Linear& l, Input x, int row, int panel, Into to) {
    nibble_tile<Of, ROWS, PANELS>(l, x, row, panel, to);
  }
  static Input from(const Linear& l, Input x, int row) { return x.from(row, l.inputs); }
  static constexpr int MANY = Shape::INT_ROWS, BYTES = 1, PANELS_OF_ONE = Shape::INT_PANELS_OF_ONE;
};

template <class Of>
struct ByteTiles : NibbleTiles<Of> {
  template <int ROWS, int PANELS>
  static void run(const Linear& l, QuantisedRows x, int row, int panel, Into to) {
    byte_tile<Of, ROWS, PANELS>(l, x, row, panel, to);
  }
};

template <class Of>
struct Int16Tiles {
  using Input = Int16Rows;
  using Wider = Wide<Of>;
  template <int ROWS, int PANELS>
  static void run(const Linear& l, Input x, int row, int panel, Into to) {
    int16_tile<Of, ROWS, PANELS>(l, x, row, panel, to);
  }
  static Input from(const Linear& l, Input x, int row) { return x.from(row, l.inputs); }
  static constexpr bool WIDENED = Shape::WIDE_ROWS > 0 && Of::FIELD < 16;
  // An unpacked panel stays in the L2 cache, and rows in the next one.
  static constexpr int MANY = Of::FIELD < 16 ? Shape::INT_ROWS : Shape::WIDE_ROWS, BYTES = 2, NEAR = WIDENED ? 2 << 20 : AnyTiles::NEAR;
  static constexpr int PANELS_OF_ONE = Shape::INT_PANELS_OF_ONE;
};

template <class Tiles, int ROWS, int PANELS>
static void panels_of_block(const Linear& l, typename Tiles::Input x, int row, int first, int last, Into to) {
  int panel = first;
  for (; panel + PANELS <= last; panel += PANELS) Tiles::template run<ROWS, PANELS>(l, x, row, panel, to);
  if constexpr (PANELS > 1) panels_of_block<Tiles, ROWS, (PANELS + 1) / 2>(l, x, row, panel, last, to);
}

// Multiplies all rows by a few panels, whose weights stay in the L1 or L2 cache.
template <class Tiles, int PANELS>
static void rows_of_panels(const Linear& l, typename Tiles::Input x, int rows, int panel, Into to) {
  int row = 0;
  for (; row + Tiles::MANY <= rows; row += Tiles::MANY) Tiles::template run<Tiles::MANY, PANELS>(l, x, row, panel, to);
  for (; row + 4 <= rows; row += 4) Tiles::template run<4, PANELS>(l, x, row, panel, to);
  for (; row + 2 <= rows; row += 2) Tiles::template run<2, PANELS>(l, x, row, panel, to);
  for (; row < rows; row++) Tiles::template run<1, PANELS>(l, x, row, panel, to);
}

constexpr int WIDE_FROM = 12;  // the fewest rows for which unpacking codes pays

// Multiplies all rows by panels `first` to `last`. Few rows take more panels at a time, to have enough sums in flight.
template <class Tiles>
static void block(const Linear& l, typename Tiles::Input x, int rows, int first, int last, Into to) {
  if constexpr (Tiles::WIDENED)
    if (rows >= WIDE_FROM) {
      using Wider = typename Tiles::Wider;
      for (int panel = first; panel < last; panel++)
        rows_of_panels<Int16Tiles<Wider>, 1>(Wider::panel_of(l, panel), x, rows, 0, Into{to.out + panel * 16, to.stride, to.add});
      return;
    }
  if (rows >= 4) {
    int panel = first;
    constexpr int PANELS = Shape::PANELS;
    for (; panel + PANELS <= last; panel += PANELS) rows_of_panels<Tiles, PANELS>(l, x, rows, panel, to);
    for (; panel < last; panel++) rows_of_panels<Tiles, 1>(l, x, rows, panel, to);
    return;
  }
  int row = 0;
  for (; row + 2 <= rows; row += 2) panels_of_block<Tiles, 2, Shape::PANELS_OF_TWO>(l, x, row, first, last, to);
  for (; row < rows; row++) panels_of_block<Tiles, 1, Tiles::PANELS_OF_ONE>(l, x, row, first, last, to);
}

constexpr int BLOCK = 4;
constexpr int TASKS = 2;  // tasks of a thread if rows are one part

// The panels that a thread takes at a time: few, so that none waits for another's last ones.
static int share_of(int panels, int parts, int threads) {
  const int tasks = parts > 1 ? panels : threads * TASKS;
  return std::max(1, (panels / tasks + BLOCK - 1) / BLOCK) * BLOCK;
}

template <class Tiles>
static void shared_out(const Linear& l, typename Tiles::Input x, int rows, Into to, int threads) {
  if (rows < 1) return;
  const int most = std::max(TOGETHER, Tiles::NEAR / (l.inputs * Tiles::BYTES));
  const int parts = (rows + most - 1) / most, many = ((rows + parts - 1) / parts + TOGETHER - 1) / TOGETHER * TOGETHER;
  int panels = (l.outputs + 15) / 16;
  int share = share_of(panels, parts, threads), shares = (panels + share - 1) / share;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int task = 0; task < parts * shares; task++) {
    int row = task / shares * many, first = task % shares * share;
    Into there{to.out + row * to.stride, to.stride, to.add};
    if (row < rows) block<Tiles>(l, Tiles::from(l, x, row), std::min(many, rows - row), first, std::min(panels, first + share), there);
  }
}

// The rows quantized to int8, in a buffer of the calling thread.
static QuantisedRows quantised(const Linear& l, const float* x, int rows, int threads) {
  static thread_local Quantised room;
  Quantised& q = room;
  q.resize(rows, l.inputs);
  size_t groups = l.inputs / GROUP;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int r = 0; r < rows; r++)
    quantise_row(x + (size_t)r * l.inputs, l.inputs, q.values.data() + (size_t)r * l.inputs, q.scale.data() + r * groups,
                 q.sum.data() + r * groups, q.offset.data() + r * groups);
  return {q.values.data(), q.scale.data(), q.sum.data(), q.offset.data()};
}

// -128 times the sum of the first sixteen numbers of each group.
static const int32_t* first_halves(const QuantisedRows& x, size_t groups) {
  static thread_local std::vector<int32_t> room;
  room.resize(groups);
  for (size_t g = 0; g < groups; g++) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += x.values[g * GROUP + i];
    room[g] = -128 * sum;
  }
  return room.data();
}

// Calls `take` with the tile type for a layer in a block format, and with the rows in the form that it needs.
template <class Of, class Take>
static void with_tiles_of(const Linear& l, const float* x, int rows, int threads, Take take) {
  if (l.int16) return take(Int16Tiles<Of>(), rounded_rows<Of>(l, x, rows, threads));
  QuantisedRows all = quantised(l, x, rows, threads);
  if constexpr (Of::DEEP) all.first = first_halves(all, (size_t)rows * l.inputs / GROUP);
  if constexpr (Of::CODE_BYTES == FourBits::CODE_BYTES)
    take(NibbleTiles<Of>(), all);
  else
    take(ByteTiles<Of>(), all);
}

template <class Take>
static void with_tiles(const Linear& l, const float* x, int rows, int threads, Take take) {
  switch (l.format) {
    case FLOAT32: return take(FloatTiles<float>(), x);
    case BFLOAT16: return take(FloatTiles<uint16_t>(), x);
    case INT8: return take(Int8Tiles(), quantised(l, x, rows, threads));
    default:
      return with_format(l.format, [&](auto of) { with_tiles_of<decltype(of)>(l, x, rows, threads, take); });
  }
}

static void multiply(const Linear& l, const float* x, int rows, Into to, int threads) {
  if (l.format == JOINED) {
    for (int i = 0; i < l.parts; i++) {
      const Linear& part = *((const Linear* const*)l.weights)[i];
      multiply(part, x, rows, to, threads);
      to.out += part.outputs;
    }
    return;
  }
#ifdef TILE_REGISTERS
  if (in_tiles(l) && enough_rows(l, rows)) return multiply_tiles(l, x, rows, to, threads);
#endif
  with_tiles(l, x, rows, threads,
             [&](auto tiles, auto from) { shared_out<decltype(tiles)>(l, from, rows, to, threads); });
}
