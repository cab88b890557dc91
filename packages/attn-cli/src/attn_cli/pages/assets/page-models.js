// The models page: their load and memory, and forms to load, unload and scale them.

import { all, errorMessage, unary } from "./api.js";
import { bytes, count, field, h, notice, number, options } from "./dom.js";

const POLL = 3000;

export async function show(host, { signal }) {
  host.append(h("h1", {}, "Models"));
  const page = new Models(host, signal);
  await page.refresh();
}

class Models {
  constructor(host, signal) {
    Object.assign(this, { signal, models: [], stats: new Map() });
    this.problem = h("div", {});
    this.table = h("div", {});
    host.append(this.problem, this.table, h("section", { class: "card" }, h("h2", {}, "Load a model"), this.loadForm()));
    const timer = setInterval(() => document.hidden || this.refresh(), POLL);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  loadForm() {
    const name = h("input", { required: true, pattern: "[A-Za-z0-9._\\-]{1,128}" });
    this.local = h("datalist", { id: "local-models" });
    const source = h("input", { list: "local-models", onfocus: () => this.nameLocal() });
    source.addEventListener("change", () => (name.value ||= source.value.split("/").at(-1).replace(/[^\w.-]/g, "-")));
    const quantization = h("select", {}, options([["", "auto"], "none", "float32", "bfloat16", "int8", "int4", "fp8"], ""));
    const cache = h("input", { placeholder: "shared" });
    const memory = h("input", { type: "number", min: 1, placeholder: "512" });
    const replicas = h("input", { type: "number", min: 1, max: 1000 });
    const button = h("button", { class: "primary" }, "Load");
    const act = async (event) => {
      event.preventDefault();
      const engine = {};
      if (quantization.value) engine.quantization = quantization.value;
      if (cache.value) engine.kv_cache = cache.value;
      if (memory.value) engine.kv_cache_memory_bytes = String(Math.round(Number(memory.value) * 2 ** 20));
      const deployment = replicas.value ? { deployment: { replicas: Number(replicas.value) } } : {};
      await this.act(button, "LoadModel", { name: name.value, source: source.value, engine, ...deployment });
    };
    return h(
      "form",
      { class: "row", onsubmit: act },
      this.local,
      field("Source", source, "A model of this server, which the list names, or a folder on it; by default the name."),
      field("Name", name, "The name that requests use."),
      field("Weights", quantization),
      field("KV cache", cache),
      field("KV cache, MiB", memory),
      field("Engines", replicas),
      button,
    );
  }

  // Fill the list of the models that lie on the server, of those that the caller may load.
  async nameLocal() {
    try {
      const { local_models: names } = await unary("ModelService", "ListModels", { page_size: 1, with_local: true }, this.signal);
      this.local.replaceChildren(...names.map((value) => h("option", { value })));
    } catch {
      // A folder or a name can be typed without it.
    }
  }

  async refresh() {
    try {
      this.models = await all("ModelService", "ListModels", "models", this.signal);
      const serving = this.models.filter((model) => model.state === "MODEL_STATE_SERVING");
      const found = await Promise.allSettled(serving.map((model) => unary("InferenceService", "GetEngineStats", { model: model.name }, this.signal)));
      this.stats = new Map(serving.map((model, place) => [model.name, found[place].value]));
      if (this.lost) this.problem.replaceChildren();
      this.lost = false;
    } catch (error) {
      if (errorMessage(error)) this.problem.replaceChildren(notice("error", errorMessage(error)));
      this.lost = true;
      return;
    }
    this.draw();
  }

  async act(button, method, body) {
    button.disabled = true;
    this.problem.replaceChildren(notice("note", `${method} ${body.name} …`));
    try {
      await unary("ModelService", method, body, this.signal);
      this.problem.replaceChildren(notice("note", `${method} ${body.name}: done.`));
      await this.refresh();
    } catch (error) {
      if (errorMessage(error)) this.problem.replaceChildren(notice("error", errorMessage(error)));
    }
    button.disabled = false;
  }

  draw() {
    // Do not redraw while an input in the cards has the focus: its text would be lost.
    if (this.table.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const cards = this.models.map((model) => this.card(model));
    this.table.replaceChildren(cards.length ? h("div", { class: "panels" }, cards) : h("p", { class: "muted" }, "No model is loaded."));
    if (focused) this.table.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  card(model) {
    const now = model.state.replace("MODEL_STATE_", "").toLowerCase();
    const stats = this.stats.get(model.name);
    const rows = [
      ["state", h("span", { class: now === "serving" ? "state-good" : now === "failed" ? "state-bad" : "" }, now + (model.state_detail ? `: ${model.state_detail}` : ""))],
      ["architecture", `${model.architecture}, ${model.mechanisms.join(", ") || "no attention"}`],
      ["size", `${count(model.num_parameters)} parameters, ${plural(model.num_layers, "layer")} of ${plural(model.num_heads, "head")}, context ${model.max_seq_len}`],
      ["computes", `${model.dtype} on ${model.device}, weights ${model.quantization || "unquantized"}`],
    ];
    if (model.base_model) rows.push(["adapter of", model.base_model]);
    if (stats) rows.push(...busy(stats));
    if (model.note) rows.push(["note", model.note]);
    const replicas = h("input", { type: "number", min: 1, max: 1000, value: Math.max(1, model.replicas), "aria-label": `engines of ${model.name}` });
    const scale = h("button", { type: "button", "data-key": `scale ${model.name}`, onclick: (event) => this.act(event.target, "ScaleModel", { name: model.name, deployment: { replicas: Number(replicas.value) } }) }, "Set engines");
    const unload = h("button", { type: "button", class: "danger", "data-key": `unload ${model.name}`, onclick: (event) => confirm(`Unload ${model.name}? Running requests are finished first.`) && this.act(event.target, "UnloadModel", { name: model.name }) }, "Unload");
    const pages = [["explorer", "Attention"], ...(model.architecture === "encoder" ? [] : [["playground", "Playground"]])];
    const links = pages.map(([page, text]) => h("a", { href: `#/${page}/${encodeURIComponent(model.name)}` }, text));
    return h(
      "section",
      { class: "card" },
      h("h2", {}, model.name),
      h("dl", { class: "facts-list" }, rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      h("div", { class: "toolbar" }, links, model.base_model ? null : [replicas, scale], unload),
    );
  }
}

const plural = (many, one) => `${many} ${one}${Number(many) === 1 ? "" : "s"}`;

function busy(stats) {
  const [used, total] = [Number(stats.kv_tokens_used), Number(stats.kv_tokens_total)];
  const meter = h("meter", { max: total || 1, value: used, "aria-label": `${used} of ${total} tokens in the KV cache` });
  const rows = [
    ["requests", `${stats.running} running, ${stats.waiting} waiting`],
    ["KV cache", h("span", {}, meter, ` ${count(used)} of ${count(total)} tokens`)],
    ["tokens", `${count(stats.generated_tokens)} generated, ${count(stats.cached_tokens)} of prompts found in the cache`],
  ];
  const memory = Number(stats.resident_memory_bytes);
  if (memory) rows.push(["processes", `${bytes(memory)} of memory, ${number(stats.cpu_seconds)} s of processor time`]);
  if (stats.replicas?.length) rows.push(["engines", stats.replicas.map(({ name, stats: own }) => `${name}: ${own.running} running`).join(", ")]);
  return rows;
}
