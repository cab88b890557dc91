// The attention explorer page: a sentence, and one or two models of this server.

import { servingModels, stream, errorMessage } from "./api.js";
import { field, h, notice, options } from "./dom.js";
import { mount } from "./explorer.js";
import { decodeLayer } from "./maps.js";

const SENTENCE = "The cat sat on the mat because it was tired.";
const WEIGHTS = 30e6; // the most attention weights of one model on a page: 120 MB

// The last inputs, restored when the user returns to the page.
const last = { text: SENTENCE, encoder: "", model: "", other: "", gradients: false };

export async function show(host, { signal, rest }) {
  const found = h("div", {});
  let models;
  try {
    models = await servingModels(signal);
  } catch (error) {
    if (errorMessage(error)) host.append(h("h1", {}, "Attention"), notice("error", errorMessage(error)));
    return;
  }
  if (rest[0]) last.model = rest[0];
  const names = models.map((model) => model.name);
  const text = h("textarea", { rows: 2, value: last.text });
  const encoder = h("textarea", { rows: 2, value: last.encoder });
  const model = h("select", {}, options(names, last.model));
  const other = h("select", {}, options([["", "none"], ...names], last.other));
  const gradients = h("input", { type: "checkbox", checked: last.gradients });
  const button = h("button", { class: "primary" }, "Show");
  let explorer = null;
  let running = null;
  const act = async () => {
    running?.abort();
    running = new AbortController();
    const mine = running;
    signal.addEventListener("abort", () => mine.abort());
    Object.assign(last, { text: text.value, encoder: encoder.value, model: model.value, other: other.value, gradients: gradients.checked });
    explorer?.close();
    found.replaceChildren(notice("note", "Computing …"));
    try {
      const views = [];
      for (const name of [model.value, other.value].filter(Boolean)) views.push(await fetched(name, mine.signal));
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
    field("Model", model),
    field("Compare with", other),
    field("Gradients", gradients, "Needs two forward passes per token.", "check"),
    h("details", { class: "field" }, h("summary", {}, "Encoder"), field("Encoder prompt", encoder, "For encoder-decoder models: the encoder's input; the sentence is then the output.", "wide")),
    button,
  );
  host.append(h("h1", {}, "Attention"), h("section", { class: "card" }, form), found);
  if (!names.length) {
    button.disabled = true;
    found.append(notice("note", "No model is loaded: load one on the page Models, or start the server with --model."));
  } else await act();
}

async function fetched(name, signal) {
  const prompt = { text: last.text };
  if (last.encoder) prompt.encoder_prompt = { text: last.encoder };
  const layers = [];
  let size = 0;
  for await (const message of stream("InferenceService", "AttentionMaps", { model: name, prompt, gradients: last.gradients }, signal)) {
    layers.push(decodeLayer(message));
    size += layers.at(-1).weights.length;
    if (size > WEIGHTS) throw new Error(`${name} has more weights for this sentence than a page can hold: make it shorter.`);
  }
  return { label: name, layers };
}
