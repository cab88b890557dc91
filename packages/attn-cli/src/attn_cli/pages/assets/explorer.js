// The attention explorer: layers by heads, one head as lines and as a matrix, rollout, gradients, and optionally a second
// model or mechanism on the same sentence. Used by the served page, by standalone files and by notebooks.

import { field, h, notice, number, onTheme, options, visible } from "./dom.js";
import { LinesView } from "./lines.js";
import { SCALES, difference, entropy, firstKey, headOf, meanOfHeads, reach, rollout, top, totalVariation } from "./maps.js";
import { MatrixView, Zoom, paint } from "./matrix.js";

const THUMB = 44;
const MEAN = -1;

export class Explorer {
  // `views`: [{ label, layers }], one or two; layers as returned by `decodeLayer`.
  constructor(views) {
    this.views = views;
    const first = views[0].layers[0];
    this.zoom = new Zoom(first.rows, first.cols);
    this.state = { layer: 0, head: first.heads.length ? 0 : MEAN, scale: "row", query: first.rows - 1, picked: false };
    this.flows = views.map((view) => rollout(view.layers));
    this.aborter = new AbortController();
    this.build();
    this.zoom.listeners.push(() => this.show());
    onTheme(() => this.show(true), this.aborter.signal);
    this.show(true);
  }

  close() {
    this.aborter.abort();
  }

  build() {
    const pick = (row) => this.change({ query: row, picked: !(this.state.picked && row === this.state.query) });
    const make = (title, kind) => new MatrixView({ title, kind, shared: this.zoom, onpick: pick });
    this.lines = new LinesView({ shared: this.zoom, onpick: pick });
    this.matrices = this.views.map((view) => make(view.label));
    this.apart = this.views.length > 1 ? make("difference", "diverging") : null;
    this.rollouts = this.views.map((view, place) => (this.flows[place] ? make(`rollout, ${view.label}`) : null));
    this.overviews = this.views.map((view, place) => this.overview(view, place));
    this.facts = h("p", { class: "facts", role: "status" });
    this.shares = h("div", { class: "shares" });
    const beside = this.rollouts.filter(Boolean).map((matrix) => matrix.element);
    const why = "Rollout needs the self-attention of all layers; it is not defined for cross-attention.";
    this.element = h(
      "div",
      { class: "explorer" },
      h("section", { class: "card layers" }, h("h2", {}, "Layers by heads"), ...this.overviews.map((one) => one.element)),
      h(
        "section",
        { class: "card" },
        h("h2", {}, "One head"),
        this.toolbar(),
        this.facts,
        h("div", { class: "panels" }, this.lines.element, ...this.matrices.map((one) => one.element), this.apart ? this.apart.element : null),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", {}, "What a token depends on"),
        h("p", { class: "muted" }, "Click a token or its row to choose a query. Attention is that of one layer; rollout combines all layers; gradients are those of the log probability of the next token."),
        this.shares,
      ),
      h("section", { class: "card" }, h("h2", {}, "Rollout"), beside.length ? h("div", { class: "panels" }, beside) : h("p", { class: "muted" }, why)),
    );
  }

  toolbar() {
    const layers = this.views[0].layers.map((layer, place) => [place, `${layer.layer} (${layer.mechanism})`]);
    const change = (name, convert) => (event) => this.change({ [name]: convert(event.target.value) });
    this.layerSelect = h("select", { onchange: change("layer", Number) }, options(layers, this.state.layer));
    this.headSelect = h("select", { onchange: change("head", Number) });
    const scale = h("select", { onchange: change("scale", String) }, options(SCALES, this.state.scale));
    const button = (text, label, act) => h("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    return h(
      "div",
      { class: "toolbar" },
      field("Layer", this.layerSelect),
      field("Head", this.headSelect),
      field("Colours", scale),
      h(
        "div",
        { class: "buttons", role: "group", "aria-label": "Zoom" },
        button("−", "Zoom out", () => this.zoom.zoom(1 / 0.7)),
        button("+", "Zoom in", () => this.zoom.zoom(0.7)),
        button("◀", "Earlier tokens", () => this.zoom.move(-0.5)),
        button("▶", "Later tokens", () => this.zoom.move(0.5)),
        button("All", "Show all tokens", () => this.zoom.reset()),
      ),
    );
  }

  // The overview table of small attention matrices, layers by heads; arrow keys move the focus between its cells.
  overview(view, number_) {
    const heads = view.layers[0].heads;
    const cells = [];
    const body = view.layers.map((layer, row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row", title: layer.mechanism }, layer.layer),
        layer.heads.map((head, place) => {
          const canvas = h("canvas", { width: THUMB * 2, height: THUMB * 2, "aria-hidden": "true" });
          const cell = h(
            "button",
            {
              type: "button",
              tabindex: cells.length ? -1 : 0,
              "aria-label": `layer ${layer.layer}, head ${head}`,
              onclick: () => this.change({ layer: row, head: place }),
              onkeydown: (event) => this.walk(event, number_, row, place),
            },
            canvas,
          );
          cells.push({ row, place, cell, canvas });
          return h("td", {}, cell);
        }),
      ),
    );
    const head = h("tr", {}, h("th", { scope: "col" }, "layer"), heads.map((one) => h("th", { scope: "col" }, one)));
    const caption = h("caption", {}, this.views.length > 1 ? `${view.label}: heads across` : "heads across");
    const table = h("table", { class: "overview" }, caption, h("thead", {}, head), h("tbody", {}, body));
    return { element: h("div", { class: "scroll" }, table), cells, view };
  }

  walk(event, number_, row, place) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const next = this.overviews[number_].cells.find((cell) => cell.row === row + down && cell.place === place + right);
    if (next) next.cell.focus();
  }

  change(changes) {
    Object.assign(this.state, changes);
    this.show("scale" in changes);
  }

  // The selected layer, head and matrix of a view; a view with fewer layers or heads uses its last one.
  chosen(view) {
    const layer = view.layers[Math.min(this.state.layer, view.layers.length - 1)];
    const head = Math.min(this.state.head, layer.heads.length - 1);
    return { layer, head, matrix: head === MEAN ? meanOfHeads(layer) : headOf(layer, head) };
  }

  show(thumbs = false) {
    if (thumbs) this.paintOverviews();
    const found = this.views.map((view) => this.chosen(view));
    const high = top(this.state.scale, found.map((one) => one.matrix));
    found.forEach(({ layer, head, matrix }, place) => {
      const title = `${this.views[place].label}, layer ${layer.layer}, ${head === MEAN ? "mean of heads" : `head ${layer.heads[head]}`}`;
      const drawn = { rows: layer.queryTokens, cols: layer.keyTokens, axes: layer.axes, top: high, title };
      this.matrices[place].set(matrix, drawn);
      // Lines that end at one token add up, so that they are drawn fainter than cells.
      const faintest = this.state.scale === "row" ? top("head", [matrix]) : high;
      if (place === 0) this.lines.set(matrix, { ...drawn, top: faintest, picked: this.state.picked ? this.state.query : null });
    });
    this.showHeads(found[0]);
    this.showFlows();
    this.showDifference(found);
    this.showFacts(found);
    this.showShares(found);
  }

  showHeads({ layer, head }) {
    const heads = [[MEAN, "mean"], ...layer.heads.map((one, place) => [place, one])];
    this.headSelect.replaceChildren(...options(heads, head));
    this.layerSelect.value = String(Math.min(this.state.layer, this.views[0].layers.length - 1));
    for (const { cells } of this.overviews)
      for (const { row, place, cell } of cells) {
        const on = row === this.state.layer && place === this.state.head;
        cell.setAttribute("aria-pressed", String(on));
      }
  }

  paintOverviews() {
    for (const { cells, view } of this.overviews)
      for (const { row, place, canvas } of cells) {
        const matrix = headOf(view.layers[row], place);
        paint(canvas, matrix, top(this.state.scale, [matrix]));
      }
  }

  showFlows() {
    const high = top(this.state.scale, this.flows.filter(Boolean));
    this.rollouts.forEach((drawn, place) => {
      const [layer] = this.views[place].layers;
      if (drawn) drawn.set(this.flows[place], { rows: layer.queryTokens, cols: layer.keyTokens, axes: layer.axes, top: high });
    });
  }

  showDifference([one, other]) {
    if (!this.apart) return;
    const change = sameTokens(one.layer, other.layer) ? difference(one.matrix, other.matrix) : null;
    this.apart.element.hidden = !change;
    if (!change) return;
    const high = top("head", [change]);
    const title = `${this.views[0].label} minus ${this.views[1].label}`;
    this.apart.set(change, { rows: one.layer.queryTokens, cols: one.layer.keyTokens, axes: one.layer.axes, top: high, title });
  }

  showFacts(found) {
    const statements = found.map(({ layer, matrix }, place) => {
      const spread = entropy(matrix);
      const parts = [
        spread === null ? "weights below 0" : `entropy ${number(spread)} nats`,
        ...(!layer.cross && layer.rows === layer.cols ? [`mean distance ${number(reach(matrix))} tokens`] : []),
        `${number(100 * firstKey(matrix), 2)} % on the first key`,
      ];
      return `${this.views.length > 1 ? `${this.views[place].label}: ` : ""}${parts.join(", ")}`;
    });
    if (found.length > 1) {
      const apart = totalVariation(found[0].matrix, found[1].matrix);
      const same = sameTokens(found[0].layer, found[1].layer);
      statements.push(same ? `they differ by ${number(apart)} (total variation: 0 equal, 1 no key in common)` : "their tokens differ: no difference is drawn");
    }
    this.facts.textContent = `${statements.join(". ")}.`;
  }

  // A table with one row per key: how much the chosen query depends on it, by attention, rollout and gradients.
  showShares(found) {
    const { layer, matrix } = found[0];
    const row = Math.min(this.state.query, layer.rows - 1);
    const line = (one) => Array.from(one.values.subarray(row * one.cols, (row + 1) * one.cols));
    const ways = [["this head", line(matrix)], ["mean of the layer", line(meanOfHeads(layer))]];
    if (this.flows[0]) ways.push(["rollout", line(this.flows[0])]);
    const [{ gradients, target, note }] = this.views[0].layers;
    if (gradients.length === layer.cols && row === layer.rows - 1) ways.push([`gradient × input of ${visible(target)}`, gradients]);
    if (this.views.length > 1 && sameTokens(layer, found[1].layer)) ways.push([this.views[1].label, line(found[1].matrix)]);
    const { k0, k1 } = this.zoom;
    const last = Math.min(k1, k0 + 200);
    const most = ways.map(([, values]) => Math.max(1e-12, ...values.map(Math.abs)));
    const head = h("tr", {}, h("th", { scope: "col" }, "key"), ways.map(([name]) => h("th", { scope: "col" }, name)));
    const body = [];
    for (let col = k0; col < last; col += 1)
      body.push(h("tr", {}, h("th", { scope: "row" }, visible(layer.keyTokens[col])), ways.map(([, values], way) => h("td", {}, bar(values[col], most[way])))));
    const caption = h("caption", {}, `${layer.axes[0]} ${row}: ${visible(layer.queryTokens[row])}`);
    const table = h("div", { class: "scroll" }, h("table", {}, caption, h("thead", {}, head), h("tbody", {}, body)));
    this.shares.replaceChildren(...(note ? [notice("note", `Gradients: ${note}.`)] : []), table);
  }
}

function bar(value, most) {
  const line = h("span", { class: value < 0 ? "bar negative" : "bar" });
  line.style.width = `${(70 * Math.abs(value)) / most}%`;
  return h("div", { class: "barred" }, line, h("span", {}, number(value, 2)));
}

function sameTokens(one, other) {
  const equal = (first, second) => first.length === second.length && first.every((token, place) => token === second[place]);
  return equal(one.queryTokens, other.queryTokens) && equal(one.keyTokens, other.keyTokens);
}

// Shows an explorer of the views in an element, or an error message if there are no attention weights; returns the explorer.
export function mount(host, views) {
  const empty = views.find((view) => !view.layers.length || !view.layers[0].rows);
  if (!views.length || empty) {
    host.replaceChildren(notice("error", "There are no attention weights to show."));
    return null;
  }
  const explorer = new Explorer(views);
  host.replaceChildren(explorer.element);
  return explorer;
}
