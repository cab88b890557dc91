// The frame of all pages: routing by the URL hash, the theme, and the token.

import { hasToken, setToken } from "./api.js";
import { field, h, notice } from "./dom.js";

const PAGES = {
  explorer: ["Attention", "./page-explorer.js"],
  playground: ["Playground", "./page-playground.js"],
  mechanisms: ["Mechanisms", "./page-mechanisms.js"],
  jobs: ["Jobs", "./page-jobs.js"],
  models: ["Models", "./page-models.js"],
};
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

const main = document.getElementById("main");
let current = new AbortController();

// The page of the address, and what follows it; the name is null for an address that is no page's.
function wanted() {
  const [name, ...rest] = (location.hash.replace(/^#\/?/, "") || "explorer").split("/");
  try {
    return { name: Object.hasOwn(PAGES, name) ? name : null, rest: rest.map(decodeURIComponent) };
  } catch {
    return { name: null, rest };
  }
}

async function show() {
  const { name, rest } = wanted();
  current.abort();
  current = new AbortController();
  const { signal } = current;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name ? PAGES[name][0] : "No such page"} · attn`;
  document.querySelector(".tip")?.remove();
  if (!name) {
    const words = `There is no page at ${location.hash}. Choose one above.`;
    main.replaceChildren(h("h1", {}, "No such page"), notice("error", words));
    return;
  }
  try {
    const page = await import(PAGES[name][1]);
    if (signal.aborted) return;
    const host = h("div", { class: "page" });
    main.replaceChildren(host);
    await page.show(host, { signal, rest });
  } catch (error) {
    if (!signal.aborted) main.append(notice("error", error.message));
  }
}

function themeButton() {
  const names = Object.keys(THEMES);
  let theme = names.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
  const button = h("button", { type: "button" });
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = THEMES[theme];
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    localStorage.setItem("theme", theme);
    apply();
  });
  apply();
  return button;
}

// The button and dialog for the bearer token, which is kept in memory until the page is closed or reloaded.
function tokenButton() {
  const input = h("input", { type: "password", autocomplete: "off", required: true });
  const form = h(
    "form",
    { method: "dialog", class: "card" },
    h("h2", {}, "Token"),
    h("p", {}, "This server requires a token. It is kept until this page is closed or reloaded, and is sent to this server only."),
    field("Token", input, "", "wide"),
    h("p", { class: "buttons" }, h("button", { class: "primary" }, "Use it"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")),
  );
  const dialog = h("dialog", { "aria-label": "Token" }, form);
  const button = h("button", { type: "button", onclick: () => dialog.showModal() }, "Token");
  form.addEventListener("submit", () => {
    setToken(input.value.trim());
    input.value = "";
    button.textContent = hasToken() ? "Token ✓" : "Token";
    show();
  });
  document.addEventListener("tokenwanted", () => {
    if (!dialog.open) dialog.showModal();
  });
  document.body.append(dialog);
  return button;
}

document.querySelector("nav").append(
  ...Object.entries(PAGES).map(([name, [title]]) => h("a", { href: `#/${name}`, "data-page": name }, title)),
);
document.getElementById("tools").append(tokenButton(), themeButton(), h("a", { href: "/docs" }, "API"));
addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
show();
