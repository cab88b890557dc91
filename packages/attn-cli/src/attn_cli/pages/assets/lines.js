// One head as lines from queries (left) to keys (right); for the query under the pointer, only its lines, with weights.

import { h, number, svg, visible } from "./dom.js";

const ROW = 20;
const MOST = 64; // most tokens on each side; others are reached by zooming
const LINES = 1500; // most lines that are drawn; the largest weights are kept

export class LinesView {
  constructor({ shared, onpick }) {
    this.shared = shared;
    this.onpick = onpick;
    this.over = null;
    this.picked = null;
    this.heading = h("figcaption", {});
    this.host = h("div", { class: "lines" });
    this.note = h("p", { class: "muted" });
    this.element = h("figure", {}, this.heading, this.host, this.note);
  }

  set(matrix, { rows, cols, axes, top, title, picked }) {
    Object.assign(this, { matrix, rows, cols, axes, top, picked });
    this.heading.textContent = title;
    const focused = this.host.contains(document.activeElement) ? document.activeElement.dataset.row : null;
    this.draw();
    if (focused !== null) this.host.querySelector(`[data-row="${focused}"]`)?.focus();
  }

  draw() {
    const { q0, k0 } = this.shared;
    const q1 = Math.min(this.shared.q1, q0 + MOST);
    const k1 = Math.min(this.shared.k1, k0 + MOST);
    this.span = { q0, q1, k0, k1 };
    const cut = q1 < this.shared.q1 || k1 < this.shared.k1;
    this.note.textContent = cut ? `The first ${MOST} of the tokens shown; zoom in or move to see the others.` : "";
    const height = Math.max(q1 - q0, k1 - k0) * ROW + 26;
    const width = 430;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "lines from queries to keys" });
    this.links = svg("g", { class: "links", "aria-hidden": "true" });
    const heads = [[`← ${this.axes[0]}`, 132, "end"], [`${this.axes[1]} →`, width - 132, "start"]].map(([text, x, anchor]) =>
      svg("text", { x, y: 12, "text-anchor": anchor, class: "axis" }, text),
    );
    this.keyLabels = range(k0, k1).map((col) => this.label(col, k0, this.cols[col], width - 132, "start"));
    const queries = range(q0, q1).map((row) => this.queryLabel(row, q0));
    root.append(this.links, ...heads, ...queries, ...this.keyLabels);
    this.host.replaceChildren(root);
    this.drawLinks();
  }

  label(place, first, token, x, anchor) {
    const shown = visible(token);
    const text = shown.length > 15 ? `${shown.slice(0, 14)}…` : shown;
    return svg("text", { x, y: (place - first) * ROW + 36, "text-anchor": anchor, class: "token" }, text);
  }

  queryLabel(row, first) {
    const strongest = this.strongest(row);
    const label = this.label(row, first, this.rows[row], 132, "end");
    const words = strongest === null ? "" : `, most to ${visible(this.cols[strongest])}, ${number(this.weight(row, strongest))}`;
    label.setAttribute("aria-label", `${this.axes[0]} ${row}: ${visible(this.rows[row])}${words}`);
    label.setAttribute("tabindex", "0");
    label.dataset.row = row;
    label.setAttribute("role", "button");
    label.setAttribute("aria-pressed", String(row === this.picked));
    const on = () => this.point(row);
    const off = () => this.point(null);
    for (const [name, act] of [["pointerenter", on], ["focus", on], ["pointerleave", off], ["blur", off]]) label.addEventListener(name, act);
    label.addEventListener("click", () => this.onpick(row));
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.onpick(row);
    });
    return label;
  }

  weight(row, col) {
    return this.matrix.values[row * this.matrix.cols + col];
  }

  strongest(row) {
    let found = null;
    for (let col = 0; col < this.matrix.cols; col += 1)
      if (this.weight(row, col) !== 0 && (found === null || Math.abs(this.weight(row, col)) > Math.abs(this.weight(row, found)))) found = col;
    return found;
  }

  point(row) {
    this.over = row;
    this.drawLinks();
  }

  drawLinks() {
    const { q0, q1, k0, k1 } = this.span;
    const only = this.over ?? this.picked;
    const rows = only !== null && only >= q0 && only < q1 ? [only] : range(q0, q1);
    let links = rows.flatMap((row) => range(k0, k1).map((col) => [row, col, this.weight(row, col)]));
    links = links.filter(([, , value]) => Math.abs(value) / this.top > 0.01);
    if (links.length > LINES) links = links.sort((one, other) => Math.abs(other[2]) - Math.abs(one[2])).slice(0, LINES);
    this.links.replaceChildren(
      ...links.map(([row, col, value]) => {
        const line = svg("line", { x1: 140, x2: 290, y1: (row - q0) * ROW + 32, y2: (col - k0) * ROW + 32 });
        if (value < 0) line.setAttribute("class", "negative");
        line.style.opacity = Math.min(1, Math.abs(value) / this.top);
        return line;
      }),
    );
    this.keyLabels.forEach((label, place) => {
      const share = rows.length === 1 ? Math.min(1, Math.abs(this.weight(rows[0], k0 + place)) / this.top) : 0;
      label.style.fontWeight = share > 0.25 ? "700" : "";
      const shown = visible(this.cols[k0 + place]);
      const text = shown.length > 15 ? `${shown.slice(0, 14)}…` : shown;
      label.textContent = rows.length === 1 && share > 0.005 ? `${text} ${number(this.weight(rows[0], k0 + place), 2)}` : text;
    });
  }
}

function range(from, to) {
  return Array.from({ length: Math.max(0, to - from) }, (_, place) => from + place);
}
