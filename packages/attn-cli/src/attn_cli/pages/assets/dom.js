// Creates elements, formats numbers for readers, and reads the theme's colours. Text is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

// An element: h("button", { class: "wide", onclick: act, "aria-label": "Send" }, "Send").
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// An element of a drawing.
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A labelled control; `about` is its description, which is shown below it.
export function field(label, control, about = "", kind = "") {
  const id = control.id || `field-${++field.count}`;
  control.id = id;
  const parts = [h("label", { for: id }, label), control];
  if (about) {
    control.setAttribute("aria-describedby", `${id}-about`);
    parts.push(h("small", { id: `${id}-about` }, about));
  }
  return h("div", { class: `field ${kind}` }, parts);
}
field.count = 0;

export function options(values, chosen) {
  return values.map((value) => {
    const [key, text] = Array.isArray(value) ? value : [value, value];
    return h("option", { value: key, selected: String(key) === String(chosen) }, text);
  });
}

// A token with white space and control characters made visible, as tokens often begin or end with them.
export function visible(token) {
  return token.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "␣") || "∅";
}

export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(Math.max(digits, Math.floor(Math.log10(size)) + 1))));
}

export function bytes(value) {
  return scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]);
}

export function count(value) {
  return scaled(value, ["", "k", "M", "G", "T", "P", "E"]).trim();
}

function scaled(value, units) {
  let place = 0;
  let left = Number(value);
  while (left >= 1000 && place < units.length - 1) {
    left /= 1000;
    place += 1;
  }
  return `${number(left)} ${units[place]}`;
}

// A message that screen readers announce; `kind` is "error" or "note".
export function notice(kind, text) {
  return h("p", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "dark" || chosen === "light") return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Call `act` when the theme changes, until `signal` is aborted.
export function onTheme(act, signal) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act, { signal });
  document.addEventListener("themechange", act, { signal });
}

const SEQUENTIAL = {
  light: ["#ffffff", "#c9dff2", "#7ab3dc", "#2b7bba", "#0a4a90", "#062a5c"],
  dark: ["#12151a", "#12375c", "#1766a3", "#3d9be0", "#9fd0f7", "#f2f9ff"],
};
const DIVERGING = {
  light: ["#9b1b30", "#e58368", "#ffffff", "#6fa8d6", "#1a4f95"],
  dark: ["#ff9d85", "#a8432f", "#12151a", "#2267a8", "#a5d3fb"],
};

// 256 colours [r, g, b] from least to most; "diverging" has its middle at 0.
export function palette(kind) {
  const stops = (kind === "diverging" ? DIVERGING : SEQUENTIAL)[isDark() ? "dark" : "light"].map((hex) =>
    [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)),
  );
  return Array.from({ length: 256 }, (_, step) => {
    const at = (step / 255) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    return stops[below].map((part, channel) => Math.round(part + (stops[below + 1][channel] - part) * (at - below)));
  });
}

// The value of a colour of the style sheet, such as "--text".
export function colour(name, element = document.documentElement) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
