// The functions that Python calls through ctypes.
#include "activate.hpp"
#include "attend_latents.hpp"
#include "attend_whole.hpp"
#include "block.hpp"
#include "draw.hpp"
#include "gemm.hpp"
#include "gemm_bfloat16.hpp"
#include "largest.hpp"
#include "pack.hpp"
#include "repack.hpp"
#include "rowwise.hpp"
#ifdef TILE_REGISTERS
#include "block_amx.hpp"
#endif

extern "C" {

enum Source { OF_FLOAT32 = 0, OF_BFLOAT16 = 1, OF_BLOCKS = 2 };

// Packs weights, given as floats or as rows of blocks in the format of the layer.
void attn_pack(const void* weights, int source, Linear* l, int threads) {
  const bool bfloat16 = source == OF_BFLOAT16;
  if (source == OF_BLOCKS) return repack((const uint8_t*)weights, *l, threads);
  if (l->format == FLOAT32) return pack_floats((const float*)weights, l->outputs, l->inputs, (float*)l->weights, threads);
  if (l->format == BFLOAT16)
    return pack_floats((const uint16_t*)weights, l->outputs, l->inputs, (uint16_t*)l->weights, threads);
  if (l->format == BFLOAT16_PAIRS)
    return pack_pairs((const uint16_t*)weights, l->outputs, l->inputs, (uint16_t*)l->weights, threads);
  uint8_t* packed = (uint8_t*)l->weights;
  if (l->format == INT8 || l->format == INT8_FOURS) {
    bool plain = l->format == INT8;
    int zero = plain ? 128 : 0, depth = plain ? 4 : INT8_DEPTH, together = plain ? 1 : 2;
    if (bfloat16) return pack_int8((const uint16_t*)weights, *l, zero, depth, together, threads);
    return pack_int8((const float*)weights, *l, zero, depth, together, threads);
  }
  if (bfloat16) return pack_int4((const uint16_t*)weights, l->outputs, l->inputs, packed, (uint16_t*)l->scales, threads);
  pack_int4((const float*)weights, l->outputs, l->inputs, packed, (uint16_t*)l->scales, threads);
}

int attn_tiles_allowed() { return tiles_allowed(); }

void attn_linear(const Linear* l, const float* x, int rows, float* out, int threads) {
  multiply(*l, x, rows, Into{out, (size_t)l->outputs, false}, threads);
}

// The first index of the largest output of each row; -1 if it is infinite or any output is NaN.
void attn_largest(const Linear* l, const float* x, int rows, int64_t* places, int threads) {
  find_largest(*l, x, rows, places, threads);
}

// out [rows, columns] = a [rows, depth] b [depth, columns] + bias.
void attn_product(const Matrix* a, const Matrix* b, const float* bias, float* out, int rows, int columns, int depth,
                  int threads) {
  gemm_shared(*a, *b, rows, columns, depth, {out, columns, bias, false}, threads);
}

// out [rows, columns] += a [rows, depth] b [depth, columns].
void attn_add_product(const Matrix* a, const Matrix* b, float* out, int rows, int columns, int depth, int threads) {
  gemm_shared(*a, *b, rows, columns, depth, {out, columns, nullptr, true}, threads);
}

// out [batch, rows, columns] = a [batch, rows, depth] b [batch, depth, columns].
void attn_products(const Matrix* a, const Matrix* b, float* out, int64_t batch, int64_t a_step, int64_t b_step, int rows,
                   int columns, int depth, int threads) {
  gemm_batch(*a, *b, out, batch, a_step, b_step, rows, columns, depth, threads);
}

// Like `attn_product`, with elements rounded to bfloat16 and sums in float32.
void attn_rounded_product(const Matrix* a, const Matrix* b, const float* bias, float* out, int rows, int columns, int depth,
                          int threads) {
  rounded_product(*a, *b, rows, columns, depth, {out, columns, bias, false}, threads);
}

// out = f(x), or f'(x) * change if `change` is given; `form` is an `Activation` of activate.hpp.
void attn_activate(int form, const float* x, const float* change, float* out, int64_t count, int threads) {
  activate(form, x, change, out, count, threads);
}

void attn_norm(const Norm* n) { norm_rows(*n); }

void attn_norm_changes(const NormChange* n) { norm_changes(*n); }

// `form` is an `Activation` of activate.hpp.
void attn_gate(int form, const Gate* g) { gate_rows(form, *g); }

void attn_turn(const Turn* t) { turn_rows(*t); }

void attn_losses(const Losses* l) { judge_rows(*l); }

// Draws a token for each row of logits; -1 if the largest score is not finite or a score is NaN.
void attn_draw(const float* logits, int rows, int size, const Draw* draws, int64_t* tokens, int threads) {
  draw_tokens(logits, rows, size, draws, tokens, threads);
}

// The log probability of one token of each row, and the `top` largest ones with their tokens.
void attn_logprobs(const float* logits, int rows, int size, const int64_t* tokens, int top, float* own, int64_t* ids,
                   float* values, int threads) {
  find_logprobs(logits, rows, size, tokens, top, own, ids, values, threads);
}

// The softmax and its logarithm of each row [rows, size], as `attn_blocks` and `attn_logprobs` compute them.
void attn_softmax(const float* scores, int64_t rows, int size, float* out, int threads) {
  softmax_rows(scores, rows, size, out, threads);
}
void attn_log_softmax(const float* logits, int64_t rows, int size, float* out, int threads) {
  log_softmax_rows(logits, rows, size, out, threads);
}

void attn_attention(const WholeAttention* a) { attention(*a); }

// The gradients of queries, keys and values; the caller must initialize those of keys and values with zeros.
void attn_attention_changes(const WholeAttention* a, const WholeAttentionChange* c) { attention_changes(*a, *c); }

void attn_attend_paged(const PagedAttention* a) {
  const Heads& heads = a->heads;
  attend({Rows{a->query, (int64_t)heads.query * heads.size, a->out}, a->key, a->value, heads, a->seen, a->tokens, a->scale, a->composed != 0, 0},
         a->threads);
}

void attn_attend_latents(const LatentAttention* a) { attend_latents(*a); }

// Applies blocks to `hidden` one after another.
void attn_blocks(const Layer* const* layers, int count, float* hidden) {
  for (int i = 0; i < count; i++) {
    const Block& b = *layers[i]->block;
    const LayerStep s = {*layers[i]->step, layers[i]->key, layers[i]->value};
#ifdef TILE_REGISTERS
    if (in_tiles(b) && enough_rows(*b.down, s.tokens)) {
      run_tiled_block(b, s, hidden);
      continue;
    }
#endif
    run_block(b, s, hidden);
  }
}
}
