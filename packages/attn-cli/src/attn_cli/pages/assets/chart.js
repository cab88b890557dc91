// Curves by uPlot (vendor/, MIT), in the colours of the theme.

import { colour, count, h, isDark, onTheme } from "./dom.js";

const COLOURS = {
  light: ["#0b5cad", "#b5430f", "#1a7038", "#7a2f9e", "#a3182c", "#806000", "#0d7480", "#59616e"],
  dark: ["#74b5f5", "#f5a86e", "#7dd698", "#d19cf0", "#ff9a8f", "#e3c65a", "#6bd3df", "#a2abb8"],
};
const DASHES = [undefined, [8, 4], [2, 3], [10, 3, 2, 3]];

let loading = null;

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: new URL("vendor/uPlot.iife.min.js", import.meta.url).href });
    script.addEventListener("load", () => resolve(globalThis.uPlot));
    script.addEventListener("error", () => reject(new Error("vendor/uPlot.iife.min.js could not be loaded.")));
    document.head.append(script);
  });
  return loading;
}

// Curves over a common axis. `lines`: [{ label, x: [...], y: [...] }]; they need not have the same x.
export class Chart {
  constructor({ title, x, y, logX = false, logY = false, unit = count, height = 280, signal }) {
    Object.assign(this, { title, x, y, logX, logY, unit, height, lines: [] });
    this.element = h("div", { class: "chart", role: "img", "aria-label": title });
    this.width = 0;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
    signal.addEventListener("abort", () => this.observer.disconnect());
    onTheme(() => this.draw(), signal);
  }

  set(lines) {
    this.lines = lines;
    this.draw();
  }

  resize() {
    if (this.element.clientWidth && this.element.clientWidth !== this.width) this.draw();
  }

  async draw() {
    const UPlot = await library();
    this.width = this.element.clientWidth;
    if (!this.width) return;
    this.plot?.destroy();
    if (!this.lines.length) {
      this.element.replaceChildren();
      return;
    }
    const { data, colours } = { data: joined(UPlot, this.lines), colours: COLOURS[isDark() ? "dark" : "light"] };
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const series = this.lines.map(({ label }, place) => ({
      label,
      stroke: colours[place % colours.length],
      dash: DASHES[Math.floor(place / colours.length + place) % DASHES.length],
      width: 2,
      spanGaps: true,
      points: { show: this.lines[place].x.length < 40, size: 5 },
      value: (_, value) => (value === null || value === undefined ? "" : this.unit(value)),
    }));
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.unit(tick)));
    const configured = {
      title: this.title,
      width: this.width,
      height: this.height,
      scales: { x: { time: false, distr: this.logX ? 3 : 1, log: 2 }, y: { distr: this.logY ? 3 : 1 } },
      series: [{ label: this.x, value: (_, value) => (value === null || value === undefined ? "" : count(value)) }, ...series],
      axes: [{ ...axis, label: this.x, labelSize: 22, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : count(tick))) }, { ...axis, label: this.y, labelSize: 22, size: 66, values }],
    };
    this.plot = new UPlot(configured, data, this.element);
    const newest = this.lines.map(({ label, y }) => `${label} ${y.length ? this.unit(y.at(-1)) : "nothing yet"}`);
    this.element.setAttribute("aria-label", `${this.title}; last values: ${newest.join(", ")}`);
  }
}

function joined(UPlot, lines) {
  const tables = lines.map(({ x, y }) => [x, y]);
  return tables.length === 1 ? tables[0] : UPlot.join(tables);
}
