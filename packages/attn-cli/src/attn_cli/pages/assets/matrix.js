// A matrix on a canvas: axes with tokens, colour bar, zoom by mouse, wheel and keys, and the cell under the pointer in words.

import { colour, h, number, palette, visible } from "./dom.js";

const FONT = 11;
const BAR = 14;
const LABELLED = 9; // pixels that a row needs for its label

// Draw `matrix` without axes; where several cells share a pixel, the largest one is shown.
export function paint(canvas, matrix, top, kind = "sequential", window = whole(matrix)) {
  const rows = window.q1 - window.q0;
  const cols = window.k1 - window.k0;
  const height = Math.min(rows, canvas.height);
  const width = Math.min(cols, canvas.width);
  const small = new OffscreenCanvas(width, height);
  const context = small.getContext("2d");
  const image = context.createImageData(width, height);
  const colours = palette(kind);
  for (let row = 0; row < height; row += 1)
    for (let col = 0; col < width; col += 1) {
      const value = extreme(matrix, cellsOf(row, height, rows, window.q0), cellsOf(col, width, cols, window.k0));
      const share = kind === "diverging" ? (value / top + 1) / 2 : Math.abs(value) / top;
      const found = colours[Math.round(255 * Math.min(1, Math.max(0, share)))];
      image.data.set([...found, 255], (row * width + col) * 4);
    }
  context.putImageData(image, 0, 0);
  const target = canvas.getContext("2d");
  target.imageSmoothingEnabled = false;
  target.drawImage(small, 0, 0, canvas.width, canvas.height);
}

export function whole(matrix) {
  return { q0: 0, q1: matrix.rows, k0: 0, k1: matrix.cols };
}

function cellsOf(pixel, pixels, cells, start) {
  const first = Math.floor((pixel * cells) / pixels);
  return [start + first, start + Math.max(first + 1, Math.floor(((pixel + 1) * cells) / pixels))];
}

function extreme(matrix, [row0, row1], [col0, col1]) {
  let found = 0;
  for (let row = row0; row < row1; row += 1)
    for (let col = col0; col < col1; col += 1) {
      const value = matrix.values[row * matrix.cols + col];
      if (Math.abs(value) > Math.abs(found)) found = value;
    }
  return found;
}

// A matrix with axes, colour bar and cell text. `shared` is a window {q0, q1, k0, k1} with listeners: its views zoom together.
export class MatrixView {
  constructor({ title, shared, kind = "sequential", onpick = null }) {
    this.kind = kind;
    this.shared = shared;
    this.onpick = onpick;
    this.cursor = null;
    this.drag = null;
    this.heading = h("figcaption", {}, title);
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      onpointerdown: (event) => this.press(event),
      onpointermove: (event) => this.hover(event),
      onpointerup: (event) => this.release(event),
      onpointerleave: () => this.leave(),
      ondblclick: () => this.shared.reset(),
      onwheel: (event) => this.wheel(event),
      onkeydown: (event) => this.key(event),
    });
    this.readout = h("output", { class: "readout", "aria-live": "polite" }, " ");
    const save = h("button", { type: "button", title: "Save this matrix as a PNG file", onclick: () => this.save() }, "PNG");
    this.element = h("figure", { class: "matrix" }, this.heading, this.canvas, this.readout, save);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // `axes`: the words for the tokens down and across.
  set(matrix, { rows, cols, axes = ["query", "key"], top, title }) {
    Object.assign(this, { matrix, rows, cols, axes, top });
    if (title) this.heading.textContent = title;
    this.cursor = null;
    this.draw();
  }

  // The layout in CSS pixels: labels are as wide as the longest token shown.
  layout() {
    const { q0, q1, k0, k1 } = this.window();
    const width = this.element.clientWidth;
    const context = this.canvas.getContext("2d");
    context.font = `${FONT}px ui-monospace, monospace`;
    const longest = (tokens, from, to) =>
      Math.min(110, Math.max(20, ...tokens.slice(from, Math.min(to, from + 400)).map((token) => context.measureText(visible(token)).width)));
    const left = longest(this.rows, q0, q1) + 26;
    const top = longest(this.cols, k0, k1) + 26;
    const inner = Math.max(60, width - left - BAR - 46);
    const ratio = (q1 - q0) / (k1 - k0);
    const cell = Math.min(34, inner / (k1 - k0));
    const plot = { left, top, width: cell * (k1 - k0), height: 0 };
    plot.height = Math.min(Math.max(plot.width * ratio, 40), 640);
    return { ...plot, full: plot.left + plot.width + BAR + 54, tall: Math.max(plot.top + plot.height + 6, plot.top + 90) };
  }

  window() {
    const { q0, q1, k0, k1 } = this.shared;
    const fits = q1 <= this.matrix.rows && k1 <= this.matrix.cols && q0 < q1 && k0 < k1;
    return fits ? { q0, q1, k0, k1 } : whole(this.matrix);
  }

  draw() {
    if (!this.matrix || !this.element.clientWidth) return;
    const place = (this.place = this.layout());
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(place.full * scale);
    this.canvas.height = Math.round(place.tall * scale);
    this.canvas.style.width = `${place.full}px`;
    this.canvas.style.height = `${place.tall}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const plot = new OffscreenCanvas(Math.max(1, Math.round(place.width * scale)), Math.max(1, Math.round(place.height * scale)));
    paint(plot, this.matrix, this.top, this.kind, this.window());
    context.drawImage(plot, place.left, place.top, place.width, place.height);
    context.strokeStyle = colour("--line", this.element);
    context.strokeRect(place.left - 0.5, place.top - 0.5, place.width + 1, place.height + 1);
    this.drawLabels(context, place);
    this.drawBar(context, place);
    this.drawCursor(context, place);
    const { q0, q1, k0, k1 } = this.window();
    const words = `${this.heading.textContent}: ${this.axes[0]} ${q0 + 1} to ${q1} down, ${this.axes[1]} ${k0 + 1} to ${k1} across`;
    this.canvas.setAttribute("aria-label", `${words}. Arrow keys read cells, plus and minus zoom, 0 shows all.`);
  }

  drawLabels(context, place) {
    const { q0, q1, k0, k1 } = this.window();
    context.font = `${FONT}px ui-monospace, monospace`;
    context.fillStyle = colour("--text", this.element);
    const [high, wide] = [place.height / (q1 - q0), place.width / (k1 - k0)];
    context.textBaseline = "middle";
    context.textAlign = "right";
    const everyRow = Math.ceil(LABELLED / high);
    for (let row = q0; row < q1; row += everyRow)
      context.fillText(clipped(this.rows[row]), place.left - 5, place.top + (row - q0 + 0.5) * high);
    const everyCol = Math.ceil(LABELLED / wide);
    for (let col = k0; col < k1; col += everyCol) {
      context.save();
      context.translate(place.left + (col - k0 + 0.5) * wide, place.top - 5);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(clipped(this.cols[col]), 0, 0);
      context.restore();
    }
    context.fillStyle = colour("--muted", this.element);
    context.font = `${FONT}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.fillText(`${this.axes[1]} →`, place.left + Math.max(place.width / 2, 24), 8);
    context.save();
    context.translate(9, place.top + place.height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(`← ${this.axes[0]}`, 0, 0);
    context.restore();
  }

  drawBar(context, place) {
    const left = place.left + place.width + 12;
    const height = Math.min(place.height, 160);
    const colours = palette(this.kind);
    for (let row = 0; row < height; row += 1) {
      context.fillStyle = `rgb(${colours[Math.round(255 * (1 - row / height))].join(" ")})`;
      context.fillRect(left, place.top + row, BAR, 1.5);
    }
    context.strokeRect(left - 0.5, place.top - 0.5, BAR + 1, height + 1);
    context.fillStyle = colour("--muted", this.element);
    context.textAlign = "left";
    const above = this.matrix.values.some((value) => Math.abs(value) > this.top * 1.001) ? "≥" : "";
    context.fillText(above + number(this.top, 2), left + BAR + 4, place.top + 5);
    const low = this.kind === "diverging" ? number(-this.top, 2) : "0";
    context.fillText(low, left + BAR + 4, place.top + height - 4);
  }

  drawCursor(context, place) {
    const { q0, q1, k0, k1 } = this.window();
    const [high, wide] = [place.height / (q1 - q0), place.width / (k1 - k0)];
    context.strokeStyle = colour("--accent", this.element);
    context.lineWidth = 2;
    if (this.cursor) {
      const [row, col] = this.cursor;
      context.strokeRect(place.left + (col - k0) * wide, place.top + (row - q0) * high, Math.max(wide, 2), Math.max(high, 2));
    }
    if (this.drag && this.drag.to) {
      const { q0: a, q1: b, k0: c, k1: d } = chosen(this.drag);
      context.strokeRect(place.left + (c - k0) * wide, place.top + (a - q0) * high, (d - c) * wide, (b - a) * high);
    }
  }

  // Offer the picture as a file, on the page's background.
  save() {
    const picture = h("canvas", { width: this.canvas.width, height: this.canvas.height });
    const context = picture.getContext("2d");
    context.fillStyle = colour("--card", this.element);
    context.fillRect(0, 0, picture.width, picture.height);
    context.drawImage(this.canvas, 0, 0);
    h("a", { href: picture.toDataURL("image/png"), download: `${this.heading.textContent.replace(/[^\w.-]+/g, "-")}.png` }).click();
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { q0, q1, k0, k1 } = this.window();
    const col = k0 + Math.floor(((event.clientX - box.left - this.place.left) / this.place.width) * (k1 - k0));
    const row = q0 + Math.floor(((event.clientY - box.top - this.place.top) / this.place.height) * (q1 - q0));
    return row >= q0 && row < q1 && col >= k0 && col < k1 ? [row, col] : null;
  }

  point(cell) {
    this.cursor = cell;
    this.readout.textContent = " ";
    if (cell) {
      const [row, col] = cell;
      const value = this.matrix.values[row * this.matrix.cols + col];
      this.readout.textContent = `${row}: ${visible(this.rows[row])} ← ${col}: ${visible(this.cols[col])}   ${number(value, 4)}`;
    }
    this.draw();
  }

  press(event) {
    const cell = this.cellAt(event);
    if (cell && event.pointerType !== "touch") this.drag = { from: cell, to: null };
  }

  hover(event) {
    const cell = this.cellAt(event);
    if (this.drag && cell && (cell[0] !== this.drag.from[0] || cell[1] !== this.drag.from[1])) this.drag.to = cell;
    this.point(cell);
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (drag && drag.to) this.shared.set(chosen(drag));
    else if (this.cellAt(event) && this.onpick) this.onpick(this.cellAt(event)[0]);
  }

  leave() {
    this.drag = null;
    this.point(null);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    this.shared.zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7, this.cellAt(event));
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key in moves) {
      const { q0, q1, k0, k1 } = this.window();
      const [row, col] = this.cursor || [q0, k0];
      const [down, right] = this.cursor ? moves[event.key] : [0, 0];
      this.point([Math.min(q1 - 1, Math.max(q0, row + down)), Math.min(k1 - 1, Math.max(k0, col + right))]);
    } else if (event.key === "+" || event.key === "=") this.shared.zoom(0.7, this.cursor);
    else if (event.key === "-") this.shared.zoom(1 / 0.7, this.cursor);
    else if (event.key === "0" || event.key === "Escape") this.shared.reset();
    else if (event.key === "Enter" && this.cursor && this.onpick) this.onpick(this.cursor[0]);
    else return;
    event.preventDefault();
  }
}

function clipped(token) {
  const shown = visible(token);
  return shown.length > 16 ? `${shown.slice(0, 15)}…` : shown;
}

function chosen({ from, to }) {
  const [rows, cols] = [0, 1].map((axis) => [from[axis], to[axis]].sort((one, other) => one - other));
  return { q0: rows[0], q1: rows[1] + 1, k0: cols[0], k1: cols[1] + 1 };
}

// The window of tokens that is shown, shared by all views of a sentence.
export class Zoom {
  constructor(rows, cols) {
    Object.assign(this, { rows, cols, listeners: [] });
    Object.assign(this, { q0: 0, q1: rows, k0: 0, k1: cols });
  }

  get zoomed() {
    return this.q0 > 0 || this.k0 > 0 || this.q1 < this.rows || this.k1 < this.cols;
  }

  set(window) {
    Object.assign(this, window);
    for (const listener of this.listeners) listener();
  }

  reset() {
    this.set({ q0: 0, q1: this.rows, k0: 0, k1: this.cols });
  }

  // Show `factor` times as many tokens, around a cell or around the middle.
  zoom(factor, cell) {
    const [row, col] = cell || [(this.q0 + this.q1) / 2, (this.k0 + this.k1) / 2];
    const [q0, q1] = around(row, (this.q1 - this.q0) * factor, this.rows);
    const [k0, k1] = around(col, (this.k1 - this.k0) * factor, this.cols);
    this.set({ q0, q1, k0, k1 });
  }

  move(share) {
    const [q, k] = [Math.round((this.q1 - this.q0) * share), Math.round((this.k1 - this.k0) * share)];
    const down = Math.max(-this.q0, Math.min(q, this.rows - this.q1));
    const right = Math.max(-this.k0, Math.min(k, this.cols - this.k1));
    this.set({ q0: this.q0 + down, q1: this.q1 + down, k0: this.k0 + right, k1: this.k1 + right });
  }
}

function around(centre, size, limit) {
  const kept = Math.max(Math.min(4, limit), Math.min(limit, Math.round(size)));
  const start = Math.max(0, Math.min(limit - kept, Math.round(centre - kept / 2)));
  return [start, start + kept];
}
