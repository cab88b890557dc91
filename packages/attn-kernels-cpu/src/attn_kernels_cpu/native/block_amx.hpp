// A whole block whose layers are multiplied in AMX tiles, in one parallel region from its first product to its last.
#pragma once
#include "block.hpp"

static inline bool in_tiles(const Block& b) {
  if (b.attended_gain || b.fed_gain || b.activation != SILU) return false;
  const Linear* all[] = {b.projections, b.output, b.both, b.down};
  for (const Linear* l : all)
    if (!in_tiles(*l) || l->format != all[0]->format || l->parts != all[0]->parts) return false;
  return true;
}

// Rows of the input of a sub-layer, normalized on access.
struct Normed {
  const float *x, *gain;
  int width;
  float eps;

  const float* operator()(int row, float* space) const {
    rms_norm_row(x + (size_t)row * width, width, gain, eps, space);
    return space;
  }
};

// The buffers for the intermediate results of a block: tiles of the inputs of its products, and rows.
struct TiledRoom {
  RowRoom entering, attended, between, gated;
  std::vector<float> rows, out;
};

template <class Parts>
struct TiledBlock {
  const Block& b;
  const LayerStep& s;
  float* hidden;
  RowTiles entering, attended, between, gated;
  float *rows, *out;
  Attention attention;

  // Whether intermediate results are written directly into tiles, which is possible for bfloat16 parts.
  static constexpr bool DIRECT = std::is_same_v<Parts, OnePart> || std::is_same_v<Parts, ThreeParts>;

  TiledBlock(const Block& b, const LayerStep& s, float* hidden, TiledRoom& room)
      : b(b), s(s), hidden(hidden),
        entering(room.entering.of(*b.projections, s.tokens)), attended(room.attended.of(*b.output, s.tokens)),
        between(room.between.of(*b.both, s.tokens)), gated(room.gated.of(*b.down, s.tokens)) {
    room.rows.resize((size_t)s.tokens * std::max(b.projections->outputs, b.down->inputs));
    room.out.resize((size_t)s.tokens * b.output->inputs);
    rows = room.rows.data();
    out = room.out.data();
    attention = attention_of(b, s, Rows{rows, b.projections->outputs, out});
    if (DIRECT && attention.parts) attention.rows.tiles.x = attended;
  }

  Normed normed(const float* gain) const { return {hidden, gain, b.output->outputs, b.eps}; }
  Into into_hidden() const { return {hidden, (size_t)b.output->outputs, true}; }

  // Computes queries, keys and values of the new tokens, applies rotary embedding and writes the cache.
  void project(const Team& team) const {
    const Linear& l = *b.projections;
    cut_rows(l, normed(b.attention_gain), entering, team.rows(entering));
    team.synchronize();
    team.multiply<Parts>(Neighbours{l, Into{rows, (size_t)l.outputs, false}}, entering);
    team.synchronize();
    Share mine = team.rows(entering);
    for (int t = mine.first; t < mine.last; t++) place_token(rows + (size_t)t * l.outputs, b, s, t);
  }

  void join(const Team& team) const {
    if (!attention.rows.tiles.x.at) {
      cut_rows(*b.output, side_by_side(out, b.output->inputs), attended, team.rows(attended));
      team.synchronize();
    }
    team.multiply<Parts>(Neighbours{*b.output, into_hidden()}, attended);
    team.synchronize();
  }

  void feed_forward(const Team& team) const {
    cut_rows(*b.both, normed(b.feed_forward_gain), between, team.rows(between));
    team.synchronize();
    if (DIRECT) {
      team.multiply<Parts>(Gated<ToTiles>{*b.both, {gated}}, between);
    } else {
      // The buffer of the queries is reused: slower threads may still read the output of attention, but not queries.
      team.multiply<Parts>(Gated<ToRows>{*b.both, {rows, (size_t)b.down->inputs}}, between);
      team.synchronize();
      cut_rows(*b.down, side_by_side(rows, b.down->inputs), gated, team.rows(gated));
    }
    team.synchronize();
    team.multiply<Parts>(Neighbours{*b.down, into_hidden()}, gated);
  }
};

template <class Parts>
static void run_tiled(const Block& b, const LayerStep& s, float* hidden) {
  static thread_local TiledRoom room;
  const TiledBlock<Parts> block(b, s, hidden, room);
  const std::vector<Tile> tiles = tiles_of(block.attention);
  const bool by_rows = Team::rows_enough(block.entering, s.threads);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Team team{omp_get_num_threads(), omp_get_thread_num(), by_rows};
    configure_tiles();
    block.project(team);
#pragma omp barrier
    attend_together(block.attention, tiles);
    block.join(team);
    block.feed_forward(team);
    release_tiles();
  }
}

static void run_tiled_block(const Block& b, const LayerStep& s, float* hidden) {
  if (b.down->format == INT4) return run_tiled<Groups>(b, s, hidden);
  if (b.down->parts == OnePart::PARTS) return run_tiled<OnePart>(b, s, hidden);
  if (b.down->parts == ThreeParts::PARTS) return run_tiled<ThreeParts>(b, s, hidden);
  run_tiled<WholeNumbers>(b, s, hidden);
}
