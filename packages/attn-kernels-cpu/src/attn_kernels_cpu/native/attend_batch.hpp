// Attention of all new tokens of a batch, shared out between threads: neighbours of a request in tiles, others one by one.
#pragma once
#include "attend_amx.hpp"
#include "attend_tile.hpp"

constexpr int FEWEST = 4;             // neighbours that are worth turning keys for
constexpr int MOST = 32;              // tokens of a tile
constexpr int MOST_ROUNDED = 64;
constexpr int WEIGHTS = 128 * 1024;  // floats that the weights of a tile may fill, to stay in the second cache

// New rows of queries [tokens, query heads, size], rows `width` apart, and where their outputs go, one after another.
struct Rows {
  const float* query;
  int64_t width;
  float* out;
};

struct Tile {
  int token, tokens;
};

// Runs of tokens each of which sees one key more than the one before it, or, unless `aligned`, another window of as many.
static std::vector<Tile> tiles_of(const Seen& seen, int tokens, int queries, bool aligned) {
  std::vector<Tile> tiles;
  for (int t = 0; t < tokens;) {
    int last = t + 1, most = std::max(FEWEST, std::min(MOST, WEIGHTS / (queries * (seen.count[t] + MOST + 32))));
    if (aligned) most = MOST_ROUNDED;
    for (; last < tokens && last - t < most; last++) {
      int64_t moved = seen.start[last] - seen.start[last - 1];
      if ((moved != 0 && (moved != 1 || aligned)) || moved + seen.count[last] != seen.count[last - 1] + 1) break;
    }
    if (last - t < FEWEST) last = t + 1;
    tiles.push_back({t, last - t});
    t = last;
  }
  return tiles;
}

template <class Element>
static void attend_tile(const Rows& rows, const Memory& key, const Memory& value, const Heads& heads, const Seen& seen,
                        Tile tile, int shared, float scale) {
  static thread_local TileRoom room;
  int queries = heads.query / heads.shared, size = heads.size;
  int64_t base = seen.start[tile.token];
  room.queries.resize((size_t)tile.tokens * queries * size);
  room.spans.clear();
  for (int i = 0; i < tile.tokens; i++) {
    int t = tile.token + i, first = seen.start[t] - base;
    std::memcpy(room.queries.data() + (size_t)i * queries * size, rows.query + t * rows.width + shared * queries * size,
                sizeof(float) * queries * size);
    room.spans.insert(room.spans.end(), queries, Span{first, first + seen.count[t]});
  }
  attend_rows<Element>(key, value, shared, seen.numbers + base, room.spans.back().last, size, scale, room);
  for (int i = 0; i < tile.tokens; i++)
    std::memcpy(rows.out + ((int64_t)(tile.token + i) * heads.query + shared * queries) * size,
                room.out.data() + (size_t)i * queries * size, sizeof(float) * queries * size);
}

#ifdef TILE_REGISTERS
template <class Element>
static void attend_rounded(const Rows& rows, const Memory& key, const Memory& value, const Heads& heads,
                           const Seen& seen, Tile tile, int shared, float scale) {
  static thread_local AmxRoom room;
  int queries = heads.query / heads.shared, size = heads.size, many = tile.tokens * queries;
  room.seen.resize(many);
  for (int row = 0; row < many; row++) room.seen[row] = seen.count[tile.token + row / queries];
  Roomed r = room.with(many, room.seen.back(), size);
  tile_queries(r, [&](int row) {
    return rows.query + (tile.token + row / queries) * rows.width + (shared * queries + row % queries) * size;
  });
  bool done = attend_tiled(r, (const Element*)key.at + shared * key.head, key.row, (const Element*)value.at + shared * value.head,
               value.row, seen.numbers + seen.start[tile.token], room.seen.data(), scale);
  if (!done) {
    for (int i = 0; i < tile.tokens; i++)
      attend_rounded<Element>(rows, key, value, heads, seen, {tile.token + i, 1}, shared, scale);
    return;
  }
  for (int i = 0; i < tile.tokens; i++)
    std::memcpy(rows.out + ((int64_t)(tile.token + i) * heads.query + shared * queries) * size,
                r.out + (size_t)i * queries * size, sizeof(float) * queries * size);
}
#endif

template <class Element>
static void attend_some(const Rows& rows, const Memory& key, const Memory& value, const Heads& heads, const Seen& seen,
                        Tile tile, int shared, float scale, bool rounded) {
#ifdef TILE_REGISTERS
  if (rounded) return attend_rounded<Element>(rows, key, value, heads, seen, tile, shared, scale);
#endif
  if (tile.tokens > 1) return attend_tile<Element>(rows, key, value, heads, seen, tile, shared, scale);
  static thread_local std::vector<float> room;
  int queries = heads.query / heads.shared, t = tile.token;
  attend_group<Element>(rows.query + t * rows.width + shared * queries * heads.size, key, value, shared, queries,
                        seen.numbers + seen.start[t], seen.count[t], heads.size, scale, room,
                        rows.out + ((int64_t)t * heads.query + shared * queries) * heads.size);
}

static void attend(const Rows& rows, const Memory& key, const Memory& value, const Heads& heads, const Seen& seen,
                   int tokens, float scale, bool rounded, int threads) {
  std::vector<Tile> tiles = tiles_of(seen, tokens, heads.query / heads.shared, rounded);
  int tasks = tiles.size() * heads.shared;
  bool plain = key.format == FLOAT32;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (rounded) configure_tiles();
    // The last tokens of a prompt see most: they come first.
#pragma omp for schedule(dynamic, 1)
    for (int task = tasks - 1; task >= 0; task--) {
      Tile tile = tiles[task / heads.shared];
      int shared = task % heads.shared;
      if (plain)
        attend_some<float>(rows, key, value, heads, seen, tile, shared, scale, rounded);
      else
        attend_some<uint16_t>(rows, key, value, heads, seen, tile, shared, scale, rounded);
    }
    if (rounded) release_tiles();
  }
}
