// Attention of all new tokens of a batch, distributed to threads: neighbouring tokens of a request in tiles.
#pragma once
#include "attend_tile.hpp"
#ifdef TILE_REGISTERS
#include "attend_amx.hpp"
#endif

constexpr int MIN_TOKENS = 4;            // with AMX: the fewest tokens of a tile, below which each is computed alone
constexpr int MAX_TOKENS = 32;           // the most tokens of a tile
constexpr int MAX_TOKENS_AMX = 128;      // the same with AMX
constexpr int MAX_WEIGHTS = 128 * 1024;  // the most floats of a tile's weights, to stay in the L2 cache

// Queries [tokens, query heads, size] with a token stride of `width`, and their outputs: contiguous rows `out`, or,
// with AMX, bfloat16 tiles if `tiles` has any.
struct Rows {
  const float* query;
  int64_t width;
  float* out;
#ifdef TILE_REGISTERS
  ToTiles tiles;
#endif
};

struct Attention {
  Rows rows;
  Memory key, value;
  Heads heads;
  Seen seen;
  int tokens;
  float scale;
  // Whether results are those of PyTorch's functions within `BatchInvariant`, bit for bit: queries are scaled before their
  // products with keys, and sums of weights are exact.
  bool composed;
  int parts;  // the bfloat16 numbers that an operand is split into for AMX tiles, one or three; 0: no tiles, as for codes

  int group() const { return heads.query / heads.shared; }
  const float* query(int token, int head) const { return rows.query + token * rows.width + head * heads.size; }
  float* out(int token, int head) const { return rows.out + ((int64_t)token * heads.query + head) * heads.size; }
};

struct Tile {
  int token, tokens;
};

// Runs of tokens, each of which sees one key more than the one before it or, without AMX, a window of the same size
// that is shifted by one.
static std::vector<Tile> tiles_of(const Attention& a) {
  const Seen& seen = a.seen;
  const int tokens = a.tokens, queries = a.group();
  std::vector<Tile> tiles;
  for (int t = 0; t < tokens;) {
    const int keys = seen.count[t] + MAX_TOKENS + 32;
    int last = t + 1, most = std::max(1, std::min(MAX_TOKENS, MAX_WEIGHTS / (queries * keys)));
    if (a.parts) most = MAX_TOKENS_AMX;
    for (; last < tokens && last - t < most; last++) {
      int64_t moved = seen.start[last] - seen.start[last - 1];
      if ((moved != 0 && (moved != 1 || a.parts)) || moved + seen.count[last] != seen.count[last - 1] + 1) break;
    }
    if (a.parts && last - t < MIN_TOKENS) last = t + 1;
    tiles.push_back({t, last - t});
    t = last;
  }
  return tiles;
}

template <class Element>
static void attend_tile(const Attention& a, Tile tile, int shared, int heads) {
  static thread_local TileRoom room;
  const int queries = a.group(), size = a.heads.size, row = queries * size;
  const int64_t base = a.seen.start[tile.token];
  room.heads = heads;
  room.queries.resize((size_t)heads * tile.tokens * row);
  room.spans.clear();
  for (int i = 0; i < tile.tokens; i++) {
    const int t = tile.token + i, first = a.seen.start[t] - base;
    room.spans.insert(room.spans.end(), queries, Span{first, first + a.seen.count[t]});
  }
  auto each = [&](auto move) {
    for (int h = 0; h < heads; h++)
      for (int i = 0; i < tile.tokens; i++) move(tile.token + i, (shared + h) * queries, (size_t)(h * tile.tokens + i) * row);
  };
  each([&](int t, int head, size_t at) { std::memcpy(room.queries.data() + at, a.query(t, head), sizeof(float) * row); });
  if (a.composed)
    for (float& x : room.queries) x *= a.scale;
  const float scale = a.composed ? 1.0f : a.scale;
  attend_rows<Element>(a.key, a.value, shared, a.seen.numbers + base, room.spans.back().last, size, scale, a.composed, room);
  each([&](int t, int head, size_t at) { std::memcpy(a.out(t, head), room.out.data() + at, sizeof(float) * row); });
}

#ifdef TILE_REGISTERS
template <int PARTS, class Element>
static void attend_in_tiles(const Attention& a, Tile tile, int shared) {
  using Of = SplitOf<Element, PARTS>;
  static thread_local AmxRoom room;
  const int queries = a.group(), size = a.heads.size, rows = tile.tokens * queries;
  room.seen.resize(rows);
  for (int row = 0; row < rows; row++) room.seen[row] = a.seen.count[tile.token + row / queries];
  const Element* keys = (const Element*)a.key.at + shared * a.key.head;
  const Element* values = (const Element*)a.value.at + shared * a.value.head;
  const int64_t* numbers = a.seen.numbers + a.seen.start[tile.token];
  const CachedHead<Element> memory{keys, values, a.key.row, a.value.row, numbers, room.seen.back(), size};
  auto token = [&](int row) { return tile.token + row / queries; };
  auto head = [&](int row) { return shared * queries + row % queries; };
  auto from = [&](int row) { return a.query(token(row), head(row)); };
  auto put = [&](int row, const float* out, float share) {
    const __m512 factor = _mm512_set1_ps(share);
    for (int d = 0; d < size; d += 16) {
      __m512 values = _mm512_mul_ps(_mm512_load_ps(out + d), factor);
      if (a.rows.tiles.x.at)
        a.rows.tiles.put(token(row), head(row) * size + d, values);
      else
        _mm512_storeu_ps(a.out(token(row), head(row)) + d, values);
    }
  };
  const AmxBuffers r = room.with(Of(), memory.blocks(), tile.tokens == 1 ? 1 : memory.blocks(), size);
  if (tile.tokens == 1) return attend_alone(Of(), r, memory, from, rows, a.scale, put);
  if (copy_blocks<Of::KEPT_PARTS>(r, memory)) return attend_tiled(Of(), r, from, room.seen.data(), rows, a.scale, put);
  // NaN and infinity must not reach rows that do not see them, not even with a weight of zero.
  for (int i = 0; i < tile.tokens; i++) attend_in_tiles<PARTS, Element>(a, {tile.token + i, 1}, shared);
}
#endif

template <class Element>
static void attend_some(const Attention& a, Tile tile, int shared, int heads) {
#ifdef TILE_REGISTERS
  if constexpr (std::is_same_v<Element, float> || std::is_same_v<Element, uint16_t>)
    if (a.parts) {
      for (int h = shared; h < shared + heads; h++)
        if (a.parts == 1)
          attend_in_tiles<1, Element>(a, tile, h);
        else
          attend_in_tiles<3, Element>(a, tile, h);
      return;
    }
#endif
  attend_tile<Element>(a, tile, shared, heads);
}

// The work of one thread of a team; with AMX its tile registers must be configured.
static void attend_together(const Attention& a, const std::vector<Tile>& tiles) {
  const int shared = a.heads.shared, team = omp_get_num_threads(), each = std::max(1, shared / team);
  const int parts = (shared + each - 1) / each;
  // The last tokens of a prompt see most keys, so they come first.
#pragma omp for schedule(dynamic, 1)
  for (int task = (int)tiles.size() * parts - 1; task >= 0; task--) {
    const Tile tile = tiles[task / parts];
    const int first = task % parts * each, last = std::min(first + each, shared);
    // Heads of a row lie together, so they are read together if their weights stay in the cache: for few rows that of
    // the chip, as each key and value is read for them alone.
    const int most = tile.tokens == 1 ? 4 * MAX_WEIGHTS : MAX_WEIGHTS;
    const int together = std::max(1, most / (tile.tokens * a.group() * (a.seen.count[tile.token] + MAX_TOKENS)));
    with_element(a.key, [&](auto element) {
      for (int h = first; h < last; h += together) attend_some<decltype(element)>(a, tile, h, std::min(together, last - h));
    });
  }
}

static void attend(const Attention& a, int threads) {
  std::vector<Tile> tiles = tiles_of(a);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#ifdef TILE_REGISTERS
    if (a.parts) configure_tiles();
    attend_together(a, tiles);
    if (a.parts) release_tiles();
#else
    attend_together(a, tiles);
#endif
  }
}

// Attention of new tokens, whose own keys and values are cached already: queries and outputs [tokens, heads, size].
struct PagedAttention {
  const float* query;
  float* out;
  Memory key, value;
  Heads heads;
  Seen seen;
  int32_t tokens, threads;
  float scale;
  int32_t composed;  // see `Attention`
};
