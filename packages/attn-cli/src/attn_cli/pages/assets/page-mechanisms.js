// The mechanisms page: equation, mask for the chosen options, cost curves, state, kernels, paper, and on request the laws.

import { all, call, errorMessage } from "./api.js";
import { Chart } from "./chart.js";
import { bytes, count, field, h, notice, number, options } from "./dom.js";
import { MatrixView, Zoom } from "./matrix.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const SIZES = [
  ["hidden_size", "Hidden size", 512],
  ["num_heads", "Heads", 8],
  ["num_kv_heads", "Key/value heads", ""],
  ["seq", "Tokens", 1024],
];
const compared = new Set();

export async function show(host, { signal, rest }) {
  const [chosen] = rest;
  host.append(h("h1", {}, "Mechanisms"));
  let mechanisms;
  try {
    mechanisms = await all("CatalogService", "ListMechanisms", "mechanisms", signal);
  } catch (error) {
    if (errorMessage(error)) host.append(notice("error", errorMessage(error)));
    return;
  }
  const names = mechanisms.map((one) => ({ ...one, key: one.ambiguous ? `${one.distribution}/${one.name}` : one.name }));
  const detail = h("div", {}, chosen ? notice("note", "Computing …") : h("p", { class: "muted" }, "Choose a mechanism."));
  host.append(h("div", { class: "columns" }, sidebar(names, chosen), detail));
  if (chosen) await new Mechanism(detail, chosen, signal).load();
}

function sidebar(mechanisms, chosen) {
  const list = h("ul", { class: "list" });
  const filter = h("input", { type: "search", oninput: () => draw() });
  const draw = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = mechanisms.filter((one) => {
      const text = `${one.key} ${one.summary} ${one.capabilities.join(" ")} ${one.paper?.authors} ${one.paper?.year}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    list.replaceChildren(
      ...found.map((one) => {
        const link = h("a", { href: `#/mechanisms/${encodeURIComponent(one.key)}`, "aria-current": one.key === chosen ? "true" : undefined }, one.key);
        return h("li", {}, link);
      }),
    );
    counted.textContent = `${found.length} of ${mechanisms.length}`;
    list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  };
  const counted = h("p", { class: "muted", role: "status" });
  draw();
  requestAnimationFrame(draw);
  return h("section", { class: "card" }, field("Find", filter, "By name, author, year, capability."), counted, list);
}

class Mechanism {
  constructor(host, name, signal) {
    Object.assign(this, { host, name, signal, sent: 0 });
    this.problem = h("div", {});
    this.zoom = new Zoom(1, 1);
    this.zoom.listeners.push(() => this.picture.draw());
    this.picture = new MatrixView({ title: "", shared: this.zoom });
    this.withoutPicture = h("p", { role: "status" });
    const chart = (title, y, unit) => new Chart({ title, x: "tokens", y, unit, logX: true, logY: true, signal });
    this.flops = chart("FLOPs of a forward pass", "FLOPs", count);
    this.state = chart("Bytes of state", "bytes", bytes);
    this.numbers = h("div", {});
    this.kernels = h("div", { class: "scroll" });
    this.laws = h("div", {});
  }

  async load() {
    const facts = await this.ask({});
    if (!facts) return;
    this.build(facts);
    this.fill(facts);
  }

  async ask(body) {
    const mine = ++this.sent;
    try {
      const facts = await call("/ui/data/mechanism", { name: this.name, compare: [...compared], ...body }, this.signal);
      return mine === this.sent ? facts : null;
    } catch (error) {
      if (errorMessage(error) && mine === this.sent) (this.built ? this.problem : this.host).replaceChildren(notice("error", errorMessage(error)));
      return null;
    }
  }

  build(facts) {
    this.built = true;
    this.inputs = Object.fromEntries(SIZES.map(([name, , value]) => [name, h("input", { type: "number", min: 1, value })]));
    this.options = facts.options.map((option) => ({ ...option, input: control(option) }));
    let waiting = 0;
    const changed = () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.refresh(), 250);
    };
    const sizes = SIZES.map(([name, label]) => field(label, this.inputs[name]));
    const own = this.options.map((option) => field(option.name, option.input, option.description, option.input.type === "checkbox" ? "check" : ""));
    const compare = h("input", { value: [...compared].join(" "), placeholder: "mha linear" });
    compare.addEventListener("input", () => {
      compared.clear();
      for (const name of compare.value.split(/[\s,]+/).filter(Boolean).slice(0, 6)) compared.add(name);
    });
    const form = h("form", { class: "row", oninput: changed, onsubmit: (event) => event.preventDefault() }, own, sizes, field("Compare curves with", compare, "Names of mechanisms."));
    const kinds = h("p", { class: "kinds" }, facts.capabilities.map((one) => h("span", { class: "kind" }, one)));
    const paper = facts.paper_url ? h("a", { href: facts.paper_url, rel: "noreferrer" }, facts.paper) : facts.paper;
    const run = h("button", { type: "button", onclick: () => this.check(run) }, "Check the laws");
    this.host.replaceChildren(
      h("section", { class: "card" }, h("h2", {}, facts.name), h("p", {}, facts.summary), h("div", { class: "equation" }, equation(facts.mathml, facts.equation)), h("p", {}, paper), facts.used_by.length ? h("p", {}, `In ${facts.used_by.join(", ")}.`) : null, kinds),
      h("section", { class: "card" }, h("h2", {}, "Options"), form, this.problem),
      h("div", { class: "panels" }, h("section", { class: "card" }, h("h2", {}, "Picture"), this.withoutPicture, this.picture.element), h("section", { class: "card" }, h("h2", {}, "One layer"), this.numbers)),
      h("section", { class: "card" }, h("h2", {}, "Costs"), h("div", { class: "panels" }, this.flops.element, this.state.element)),
      h("section", { class: "card" }, h("h2", {}, "Kernels"), this.kernels),
      h("section", { class: "card" }, h("h2", {}, "Laws"), h("p", { class: "muted" }, "The conformance kit tries causality, padding, decoding, gradients, state bytes, cost and more on the server; this takes some seconds."), run, this.laws),
    );
  }

  // The options that differ from their defaults, as numbers, booleans and strings.
  given() {
    const found = {};
    for (const { name, type, default: usual, input } of this.options) {
      const value = input.type === "checkbox" ? input.checked : input.value.trim();
      if (value === "" || value === shown(usual)) continue;
      if (typeof value === "boolean") {
        if (value !== Boolean(usual)) found[name] = value;
      } else found[name] = /int|float/.test(type) && Number.isFinite(Number(value)) ? Number(value) : value;
    }
    return found;
  }

  async refresh() {
    const sizes = Object.fromEntries(SIZES.map(([name]) => [name, this.inputs[name].value]).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
    const facts = await this.ask({ options: this.given(), ...sizes });
    if (!facts) return;
    this.problem.replaceChildren();
    this.fill(facts);
  }

  fillPicture({ grid, caption }) {
    this.picture.element.hidden = grid.length === 0;
    this.withoutPicture.textContent = grid.length === 0 ? caption : "";
    if (grid.length === 0) return;
    const [rows, cols] = [grid.length, grid[0].length];
    const matrix = { rows, cols, values: Float32Array.from(grid.flat()) };
    Object.assign(this.zoom, { rows, cols, q0: 0, q1: rows, k0: 0, k1: cols });
    const places = (size) => Array.from({ length: size }, (_, place) => String(place));
    const most = Math.max(...matrix.values.map(Math.abs)) || 1;
    this.picture.set(matrix, { rows: places(rows), cols: places(cols), top: most, title: caption });
  }

  fill(facts) {
    this.fillPicture(facts.picture);
    const states = facts.states.map((state) => `${state.name} (${state.kind}): ${Object.entries(state.fields).map(([name, row]) => `${name} [${row.shape.join(", ")}] ${row.dtype}`).join(", ")}`);
    const rowsOf = [
      ["state", states.join("; ") || "none"],
      [`bytes at ${count(facts.tokens)} tokens`, bytes(facts.state_bytes)],
      ["bytes per token", bytes(facts.state_bytes_per_token)],
      ["FLOPs", count(facts.flops)],
      ["FLOPs of allowed pairs", count(facts.allowed_flops)],
      ["parameters", count(facts.parameters)],
      ["attention weights", facts.weights],
      ["package", facts.package],
    ];
    this.numbers.replaceChildren(h("dl", { class: "facts-list" }, rowsOf.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
    const curves = (key) => facts.curves.map(({ name, tokens, [key]: values }) => ({ label: name, x: tokens, y: values.map((value) => value || null) }));
    this.flops.set(curves("allowed_flops"));
    this.state.set(curves("state_bytes"));
    const head = h("tr", {}, ["part", "kernel", "verdict", "cost", "reasons"].map((name) => h("th", { scope: "col" }, name)));
    const body = facts.kernels.map((row) => h("tr", {}, h("td", {}, row.part), h("td", {}, row.name), h("td", { class: row.verdict === "runs" ? "state-good" : "" }, row.verdict), h("td", { class: "number" }, row.cost === null ? "" : number(row.cost, 3)), h("td", { class: "words" }, row.reasons)));
    this.kernels.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
  }

  async check(button) {
    button.disabled = true;
    this.laws.replaceChildren(notice("note", "Checking …"));
    try {
      const { laws } = await call("/ui/data/check", { name: this.name, options: this.given() }, this.signal);
      const broken = laws.filter((law) => law.verdict === "BROKEN").length;
      const kept = laws.filter((law) => law.verdict === "kept").length;
      const rows = laws.map((law) => h("tr", {}, h("td", { class: law.verdict === "kept" ? "state-good" : law.verdict === "BROKEN" ? "state-bad" : "muted" }, law.verdict), h("td", {}, law.law), h("td", { class: "words" }, law.says)));
      const words = h("p", { role: "status" }, `${number(kept)} laws kept, ${number(broken)} broken, ${number(laws.length - kept - broken)} not asked.`);
      this.laws.replaceChildren(words, h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, rows))));
    } catch (error) {
      if (errorMessage(error)) this.laws.replaceChildren(notice("error", errorMessage(error)));
    }
    button.disabled = false;
  }
}

function shown(value) {
  return value === null || value === undefined ? "" : String(value);
}

function control({ type, default: given, required, sketch }) {
  const usual = required ? sketch : given;
  if (type === "bool") return h("input", { type: "checkbox", checked: Boolean(usual) });
  const common = { value: shown(usual) };
  if (/^(int|float)/.test(type)) return h("input", { type: "number", step: type.startsWith("int") ? 1 : "any", ...common });
  const words = [...type.matchAll(/['"]([^'"]+)['"]/g)].map(([, word]) => word);
  if (type.startsWith("Literal") && words.length) return h("select", {}, options(words, usual));
  return h("input", common);
}

// The MathML that the server converted from LaTeX, restricted to MathML elements and harmless attributes.
function equation(lines, latex) {
  const made = lines.map((line) => {
    const parsed = new DOMParser().parseFromString(line, "application/xml").documentElement;
    return parsed.namespaceURI === MATHML ? cleaned(parsed) : null;
  });
  return made.length && made.every(Boolean) ? made : h("code", {}, latex);
}

function cleaned(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  if (node.nodeType !== Node.ELEMENT_NODE || node.namespaceURI !== MATHML) return document.createTextNode("");
  const copy = document.createElementNS(MATHML, node.localName);
  for (const name of ["display", "mathvariant", "stretchy", "fence", "form", "separator", "accent", "linethickness", "columnalign", "minsize", "maxsize"])
    if (node.hasAttribute(name)) copy.setAttribute(name, node.getAttribute(name));
  copy.append(...Array.from(node.childNodes, cleaned));
  return copy;
}
