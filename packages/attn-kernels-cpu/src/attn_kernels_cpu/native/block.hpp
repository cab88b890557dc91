// A whole pre-norm block for the new tokens of many requests: attention and a gated feed-forward, with residual
// connections.
#pragma once
#include "activate.hpp"
#include "attend_batch.hpp"

struct Block {
  const Linear *projections, *output, *both, *down;
  const float *attention_gain, *feed_forward_gain;
  const float *query_gain, *key_gain;    // of the norms of each head; null without
  const float *attended_gain, *fed_gain;  // of the norms of what is added to hidden; null without
  float eps, head_eps, scale;
  Heads heads;
  int32_t rotated, interleaved;
  int32_t parts;       // for attention with AMX, which requires a mask without a window; see `Attention`
  int32_t activation;  // of the gate, an `Activation` of activate.hpp
};

// The part of a step that all layers of one kind share.
struct Step {
  int32_t tokens, threads;
  const float *cosines, *sines;  // [tokens, rotated], sines signed
  const int64_t* targets;        // the cache rows of the new tokens
  Seen seen;
  int32_t composed;  // whether results are those of the parts of a block within `BatchInvariant`, see `Attention`
};

struct Layer {
  const Block* block;
  const Step* step;
  Memory key, value;
};

struct LayerStep : Step {
  Memory key, value;
};

static inline Floats rotated_by(Floats x, Floats partner, const float* cosines, const float* sines, bool composed) {
  const Floats part = x * load16(cosines);
  return composed ? part + partner * load16(sines) : fmadd(partner, load16(sines), part);
}

// Rotates the pairs of elements i and i + half, for sixteen i at a time.
static inline void rotate_halves(float* x, const float* cosines, const float* sines, int half, bool composed) {
  for (int i = 0; i < half; i += 16) {
    Floats first = load16(x + i), second = load16(x + i + half);
    store16(x + i, rotated_by(first, second, cosines + i, sines + i, composed));
    store16(x + i + half, rotated_by(second, first, cosines + i + half, sines + i + half, composed));
  }
}

static inline void rotate_head(float* x, const float* cosines, const float* sines, int rotated, bool interleaved,
                               bool composed) {
  if (!interleaved && rotated % 32 == 0) return rotate_halves(x, cosines, sines, rotated / 2, composed);
  float rotated_head[512];
  int half = rotated / 2;
  for (int i = 0; i < rotated; i++) {
    int partner = interleaved ? i ^ 1 : (i < half ? i + half : i - half);
    const float part = x[i] * cosines[i];
    rotated_head[i] = composed ? part + x[partner] * sines[i] : std::fma(x[partner], sines[i], part);
  }
  std::memcpy(x, rotated_head, sizeof(float) * rotated);
}

template <class Element>
static inline void write_cache(const float* rows, const Memory& memory, int64_t target, const Heads& heads) {
  for (int h = 0; h < heads.shared; h++) {
    const float* row = rows + h * heads.size;
    Element* to = memory.of<Element>(target, h);
    if constexpr (std::is_same_v<Element, int8_t>)
      memory.scale(target, h) = code_row(row, heads.size, to);
    else
      for (int d = 0; d < heads.size; d += 16) store16(to + d, load16(row + d));
  }
}

static inline void place_token(float* row, const Block& b, const LayerStep& s, int t) {
  const Heads& heads = b.heads;
  float *key = row + heads.query * heads.size, *value = key + heads.shared * heads.size;
  for (int h = 0; b.query_gain && h < heads.query + heads.shared; h++) {
    float* head = row + h * heads.size;
    rms_norm_row(head, heads.size, h < heads.query ? b.query_gain : b.key_gain, b.head_eps, head);
  }
  if (b.rotated) {
    const float *cosines = s.cosines + (size_t)t * b.rotated, *sines = s.sines + (size_t)t * b.rotated;
    for (int h = 0; h < heads.query + heads.shared; h++)
      rotate_head(row + h * heads.size, cosines, sines, b.rotated, b.interleaved, s.composed);
  }
  with_element(s.key, [&](auto element) {
    write_cache<decltype(element)>(key, s.key, s.targets[t], heads);
    write_cache<decltype(element)>(value, s.value, s.targets[t], heads);
  });
}

static Attention attention_of(const Block& b, const LayerStep& s, Rows rows) {
  const bool tiles = tiles_allowed() && (s.key.format == FLOAT32 || s.key.format == BFLOAT16) && !s.composed;
  return {rows, s.key, s.value, b.heads, s.seen, s.tokens, b.scale, s.composed != 0, tiles ? b.parts : 0};
}

static void norm_rows(const float* x, int tokens, int width, const float* gain, float eps, float* out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens > 8)
  for (int t = 0; t < tokens; t++) rms_norm_row(x + (size_t)t * width, width, gain, eps, out + (size_t)t * width);
}

static inline void gate_row(int activation, const float* both, int width, bool composed, float* out) {
  if (activation == SILU && !composed) return silu_gate_row(both, width, out);
  with_activation(activation, [=](auto f) {
    for (int i = 0; i < width; i += 16) store16(out + i, f.at(load16(both + i)).value * load16(both + width + i));
  });
}

// out = f(gate) * up, where [gate, up] are the outputs of the block's layer `both`; `rows` is a buffer for them.
static void gate(const Block& b, const Step& s, const float* x, float* rows, float* out) {
  const Linear& both = *b.both;
  const int inner = both.outputs / 2, tokens = s.tokens, threads = s.threads;
  multiply(both, x, tokens, Into{rows, (size_t)(2 * inner), false}, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens > 4)
  for (int t = 0; t < tokens; t++) gate_row(b.activation, rows + (size_t)t * 2 * inner, inner, s.composed, out + (size_t)t * inner);
}

// hidden += layer(x), or its norm with `gain` if there is one, for which `room` [tokens, width] is a buffer.
static void add_output(const Linear& layer, const float* x, int tokens, const float* gain, float eps, float* room,
                       float* hidden, int threads) {
  const int width = layer.outputs;
  if (!gain) return multiply(layer, x, tokens, Into{hidden, (size_t)width, true}, threads);
  multiply(layer, x, tokens, Into{room, (size_t)width, false}, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens > 8)
  for (int t = 0; t < tokens; t++) {
    float *row = room + (size_t)t * width, *to = hidden + (size_t)t * width;
    rms_norm_row(row, width, gain, eps, row);
    for (int i = 0; i < width; i++) to[i] += row[i];
  }
}

// Applies the block to hidden [tokens, width] in place.
static void run_block(const Block& b, const LayerStep& s, float* hidden) {
  static thread_local std::vector<float> normed, wide, mixed;
  int width = b.output->outputs, tokens = s.tokens, threads = s.threads;
  int projected = b.projections->outputs, inner = b.down->inputs, attended = b.output->inputs;
  normed.resize((size_t)tokens * width);
  wide.resize((size_t)tokens * std::max(projected, 2 * inner));
  mixed.resize((size_t)tokens * std::max(attended, inner));
  float *rows = wide.data(), *out = mixed.data();
  norm_rows(hidden, tokens, width, b.attention_gain, b.eps, normed.data(), threads);
  multiply(*b.projections, normed.data(), tokens, Into{rows, (size_t)projected, false}, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens > 8)
  for (int t = 0; t < tokens; t++) place_token(rows + (size_t)t * projected, b, s, t);
  attend(attention_of(b, s, Rows{rows, projected, out}), threads);
  add_output(*b.output, out, tokens, b.attended_gain, b.eps, normed.data(), hidden, threads);
  norm_rows(hidden, tokens, width, b.feed_forward_gain, b.eps, normed.data(), threads);
  gate(b, s, normed.data(), rows, out);
  add_output(*b.down, out, tokens, b.fed_gain, b.eps, normed.data(), hidden, threads);
}
