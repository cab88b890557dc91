// The attention explorer page: a sentence, and one or two models of this server.

import { errorMessage, missingModel, servingModels, stream } from "./api.js";
import { field, h, notice, options } from "./dom.js";
import { mount } from "./explorer.js";
import { decodeLayer } from "./maps.js";

const SENTENCE = "The cat sat on the mat because it was tired.";
const WEIGHTS = 30e6; // the most attention weights of one model on a page: 120 MB

// The last inputs, restored when the user returns to the page.
const last = { text: SENTENCE, source: "", model: "", other: "", gradients: false };

export async function show(host, { signal, rest }) {
  const found = h("div", {});
  let models;
  try {
    models = await servingModels(signal);
  } catch (error) {
    if (errorMessage(error)) host.append(h("h1", {}, "Attention"), notice("error", errorMessage(error)));
    return;
  }
  const names = models.map((model) => model.name);
  const missing = missingModel(rest[0], names);
  if (rest[0] && !missing) last.model = rest[0];
  const text = h("textarea", { rows: 2, required: true, value: last.text });
  const source = field("Source", h("textarea", { rows: 2, value: last.source }), "The encoder's input; the sentence is then what the decoder writes. If empty, the model writes it for the sentence.", "wide");
  const chosen = () => models.filter(({ name }) => name === model.value || name === other.value);
  const ask = () => (source.hidden = !chosen().some(readsSource));
  const model = h("select", { onchange: ask }, options(names, last.model));
  const other = h("select", { onchange: ask }, options([["", "none"], ...names], last.other));
  ask();
  const gradients = h("input", { type: "checkbox", checked: last.gradients });
  const button = h("button", { class: "primary" }, "Show");
  let explorer = null;
  let running = null;
  const act = async () => {
    running?.abort();
    running = new AbortController();
    const mine = running;
    signal.addEventListener("abort", () => mine.abort());
    Object.assign(last, { text: text.value, source: source.querySelector("textarea").value, model: model.value, other: other.value, gradients: gradients.checked });
    explorer?.close();
    found.replaceChildren(notice("note", "Computing …"));
    try {
      const views = [];
      for (const name of [model.value, other.value].filter(Boolean)) views.push(await fetched(models.find((one) => one.name === name), mine.signal));
      explorer = mount(found, views);
    } catch (error) {
      if (errorMessage(error)) found.replaceChildren(notice("error", errorMessage(error)));
    }
  };
  signal.addEventListener("abort", () => explorer?.close());
  const form = h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        act();
      },
    },
    field("Sentence", text, "", "wide"),
    source,
    field("Model", model),
    field("Compare with", other),
    field("Gradients", gradients, "Needs two forward passes per token.", "check"),
    button,
  );
  host.append(h("h1", {}, "Attention"), missing ? notice("error", missing) : "", h("section", { class: "card" }, form), found);
  if (!names.length) {
    button.disabled = true;
    found.append(notice("note", "No model is loaded: load one on the page Models, or start the server with --model."));
  } else await act();
}

const readsSource = (model) => model.max_encoder_len > 0;

// The prompt of a model for the sentence; for an encoder-decoder without a source, the sentence and what it writes for it.
async function promptOf(model, signal) {
  if (!readsSource(model)) return { text: last.text };
  if (last.source) return { text: last.text, encoder_prompt: { text: last.source } };
  const encoder_prompt = { text: last.text };
  let text = "";
  const request = { model: model.name, prompt: { text, encoder_prompt }, sampling: { temperature: 0, max_new_tokens: Math.min(100, model.max_seq_len - 1) } };
  for await (const message of stream("InferenceService", "Generate", request, signal)) text += message.text;
  return { text, encoder_prompt };
}

async function fetched(model, signal) {
  const { name } = model;
  const prompt = await promptOf(model, signal);
  const layers = [];
  let size = 0;
  for await (const message of stream("InferenceService", "AttentionMaps", { model: name, prompt, gradients: last.gradients }, signal)) {
    layers.push(decodeLayer(message));
    size += layers.at(-1).weights.length;
    if (size > WEIGHTS) throw new Error(`${name} has more weights for this sentence than a page can hold: make it shorter.`);
  }
  return { label: name, layers };
}
