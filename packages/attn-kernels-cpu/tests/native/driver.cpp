// Packs layers and a block of numbers that are made here, and writes the bits of what they compute: the same from every
// instruction set. For chips that only an emulator has.
#include <cstdio>

#include "kernels.cpp"

static uint32_t state = 1;
static float number() {
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)(state >> 8) / 8388608.0f - 1.0f;
}
static std::vector<float> numbers(size_t count, float size = 1.0f) {
  std::vector<float> made(count);
  for (float& x : made) x = number() * size;
  return made;
}

struct Layers {
  std::vector<uint8_t> weights;
  std::vector<uint16_t> scales;
  std::vector<float> steps, bias;
  Linear linear;

  Layers(int format, int outputs, int inputs) {
    int padded = (outputs + 31) / 32 * 32;
    weights.resize((size_t)padded * inputs * 4);
    scales.resize((size_t)padded * inputs / GROUP * 2);
    steps.resize(padded);
    bias = numbers(padded);
    linear = {format, inputs, outputs, 0, 0, weights.data(), scales.data(), steps.data(), bias.data()};
    std::vector<float> source = numbers((size_t)outputs * inputs, 0.2f);
    std::vector<uint16_t> halves;
    for (float x : source) {
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      halves.push_back(bits >> 16);
    }
    bool half = format == BFLOAT16;
    attn_pack(half ? (const void*)halves.data() : source.data(), half, &linear, 2);
  }
};

static void put(const void* at, size_t bytes) { fwrite(at, 1, bytes, stdout); }

static void products(int format, bool int16 = false) {
  Layers layer(format, 83, 96);
  layer.linear.int16 = int16;
  for (int rows : {1, 2, 3, 5, 13}) {
    std::vector<float> x = numbers(rows * 96, 3.0f), out(rows * 83);
    std::vector<int64_t> places(rows);
    if (rows == 5) x[100] = std::numeric_limits<float>::infinity();
    attn_linear(&layer.linear, x.data(), rows, out.data(), 2);
    attn_largest(&layer.linear, x.data(), rows, places.data(), 2);
    for (float& value : out)
      if (std::isnan(value)) value = 7.0f;  // of which there are many
    put(out.data(), out.size() * 4);
    put(places.data(), places.size() * 8);
  }
}

template <class Element>
static void block(int format) {
  const Heads heads = {4, 2, 32};
  const int width = 64, inner = 96, most = 64, kept = heads.shared * heads.size;
  Layers projections(format, (heads.query + 2 * heads.shared) * heads.size, width), output(format, width, heads.query * heads.size);
  Layers both(format, 2 * inner, width), down(format, width, inner);
  std::vector<float> gain = numbers(width), other = numbers(width), turns = numbers(2 * most * 32);
  std::vector<Element> keys(most * kept), values(most * kept);
  std::vector<uint16_t> scales(2 * most * heads.shared);
  const bool normed = sizeof(Element) == 2;  // what is added, with another activation
  const Block b = {&projections.linear, &output.linear, &both.linear, &down.linear, gain.data(), other.data(),
                   gain.data(), other.data(), normed ? gain.data() : nullptr, normed ? other.data() : nullptr,
                   1e-5f, 1e-6f, 0.17f, heads, 32, 0, 0, normed ? GELU_TANH : SILU};
  std::vector<int64_t> rows(most), start(most, 0);
  std::vector<int32_t> count(most);
  for (int i = 0; i < most; i++) rows[i] = (i * 5) % most, count[i] = i + 1;
  int done = 0;
  for (int tokens : {1, 21, 1, 2, 1, 13}) {
    const bool composed = done >= 25;
    Step step{tokens, 2, turns.data() + done * 32, turns.data() + most * 32, rows.data() + done, {rows.data(), start.data(), count.data() + done}, composed};
    const int form = sizeof(Element) == 4 ? FLOAT32 : sizeof(Element) == 1 ? INT8 : BFLOAT16;
    Layer layer{&b, &step, {keys.data(), kept, heads.size, form, scales.data(), 2 * heads.shared, 1},
                {values.data(), kept, heads.size, form, scales.data() + heads.shared, 2 * heads.shared, 1}};
    const Layer* layers[] = {&layer, &layer};
    std::vector<float> hidden = numbers(tokens * width);
    attn_blocks(layers, 2, hidden.data());
    put(hidden.data(), hidden.size() * 4);
    done += tokens;
  }
}

static void draws() {
  const int rows = 6, size = 700;
  std::vector<float> logits = numbers(rows * size, 5.0f), own(rows), values(rows * 4);
  std::vector<int64_t> tokens(rows), ids(rows * 4);
  for (int top_k : {0, 30})
    for (double top_p : {1.0, 0.9}) {
      std::vector<Draw> how(rows);
      for (int r = 0; r < rows; r++) {
        how[r] = Draw{};
        how[r].point = (r + 0.5) / rows;
        how[r].top_p = top_p, how[r].top_k = top_k, how[r].inverse = 1.0f / (1 + r);
      }
      attn_draw(logits.data(), rows, size, how.data(), tokens.data(), 2);
      put(tokens.data(), tokens.size() * 8);
    }
  attn_logprobs(logits.data(), rows, size, tokens.data(), 4, own.data(), ids.data(), values.data(), 2);
  put(own.data(), own.size() * 4);
  put(ids.data(), ids.size() * 8);
  put(values.data(), values.size() * 4);
}

static void softmaxes() {
  const int rows = 3, size = 45;
  std::vector<float> scores = numbers(rows * size, 9.0f), out(rows * size);
  scores[50] = -std::numeric_limits<float>::infinity();
  attn_softmax(scores.data(), rows, size, out.data(), 2);
  put(out.data(), out.size() * 4);
  attn_log_softmax(scores.data(), rows, size, out.data(), 2);
  put(out.data(), out.size() * 4);
}

int main() {
  draws();
  softmaxes();
  for (int format : {FLOAT32, BFLOAT16, INT8, INT4}) products(format);
  products(INT4, true);
  for (int format : {FLOAT32, INT8, INT4}) {
    block<float>(format);
    block<uint16_t>(format);
    block<int8_t>(format);
  }
}
