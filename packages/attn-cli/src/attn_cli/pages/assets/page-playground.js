// Chat and completion with streaming, sampling parameters, log probabilities by hovering, and a stop button.

import { errorMessage, missingModel, servingModels, stream } from "./api.js";
import { field, h, notice, number, options, visible } from "./dom.js";

// Name in SamplingParams, label, attributes of the input.
const PARAMETERS = [
  ["max_new_tokens", "Maximum tokens", { min: 1, step: 1, value: 200 }],
  ["temperature", "Temperature", { min: 0, max: 5, step: "any", value: 0.7 }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any", value: 0.95 }],
  ["top_k", "Top k", { min: 0, step: 1, value: 0 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any", value: 0 }],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: "any", value: 1 }],
  ["seed", "Seed", { min: 0, step: 1, value: "" }],
];
const DOUBTS = [0.5, 0.2, 0.05];
const turns = [];

export async function show(host, { signal, rest }) {
  host.append(h("h1", {}, "Playground"));
  let models;
  try {
    models = await servingModels(signal);
  } catch (error) {
    if (errorMessage(error)) host.append(notice("error", errorMessage(error)));
    return;
  }
  const writers = models.filter((model) => model.architecture !== "encoder");
  if (!writers.length) {
    const which = models.length ? "No model that writes text is loaded, only encoders" : "No model is loaded";
    host.append(notice("note", `${which}: load one on the page Models, or name it when you start the server.`));
    return;
  }
  const missing = missingModel(rest[0], writers.map((model) => model.name));
  if (missing) host.append(notice("error", missing));
  new Playground(host, writers, signal, rest[0]);
}

class Playground {
  constructor(host, models, signal, chosen) {
    this.models = Object.fromEntries(models.map((model) => [model.name, model]));
    this.signal = signal;
    this.running = null;
    this.model = h("select", { onchange: () => this.showMode() }, options(Object.keys(this.models), chosen));
    // The parameters belong to the form of the message, so that it is not sent while one of them is invalid.
    this.inputs = Object.fromEntries(PARAMETERS.map(([name, , attributes]) => [name, h("input", { type: "number", form: "talk", ...attributes })]));
    this.doubts = h("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.log = h("div", { class: "chat", role: "log", "aria-live": "polite", "aria-label": "conversation" });
    this.problem = h("div", {});
    this.text = h("textarea", {
      rows: 3,
      required: true,
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    });
    this.sendButton = h("button", { class: "primary", type: "submit" }, "Send");
    this.stopButton = h("button", { type: "button", class: "danger", disabled: true, onclick: () => this.running?.abort() }, "Stop");
    this.mode = h("p", { class: "muted" });
    const clear = h("button", { type: "button", onclick: () => this.clear() }, "New conversation");
    const submit = (event) => {
      event.preventDefault();
      this.send();
    };
    const form = h("form", { id: "talk", onsubmit: submit }, field("Message", this.text, "Enter sends; Shift and Enter start a new line."), h("p", { class: "buttons" }, this.sendButton, this.stopButton, clear));
    const parameters = PARAMETERS.map(([name, label]) => field(label, this.inputs[name]));
    const side = h("section", { class: "card", "aria-label": "Parameters" }, field("Model", this.model), this.mode, parameters, field("Colour unlikely tokens", this.doubts, "Below 50, 20 and 5 %.", "check"));
    host.append(h("div", { class: "columns talk" }, side, h("section", { class: "card", "aria-label": "Conversation" }, this.log, this.problem, form)));
    signal.addEventListener("abort", () => this.running?.abort());
    this.showMode();
    this.draw();
  }

  showMode() {
    const { chat, max_encoder_len: source, max_seq_len: context } = this.models[this.model.value];
    const most = this.inputs.max_new_tokens;
    most.max = context;
    if (Number(most.value) > context / 2) most.value = Math.ceil(context / 2);
    this.mode.textContent = source ? "An encoder-decoder: the model reads the last message, and writes what it was trained to, such as a translation." : chat ? "Has a chat template: the model reads the whole conversation." : "Has no chat template: the model continues the last message only.";
  }

  clear() {
    this.running?.abort();
    turns.length = 0;
    this.draw();
    this.text.focus();
  }

  sampling() {
    const given = Object.entries(this.inputs).filter(([, input]) => input.value !== "");
    return Object.fromEntries([...given.map(([name, input]) => [name, name === "seed" ? input.value : Number(input.value)]), ["top_logprobs", 5]]);
  }

  async send() {
    const content = this.text.value;
    if (!content.trim() || this.running) return;
    const model = this.model.value;
    this.text.value = "";
    turns.push({ role: "user", content });
    const messages = turns.map(({ role, content: text }) => ({ role, content: text }));
    const { chat, max_encoder_len: source } = this.models[model];
    const prompt = source ? { text: "", encoder_prompt: { text: content } } : chat ? { chat: { messages } } : { text: content };
    const turn = { role: "assistant", content: "", pieces: [], model, tokens: 0, after: "" };
    turns.push(turn);
    this.draw();
    this.running = new AbortController();
    this.busy(true);
    try {
      await this.receive(turn, { model, prompt, sampling: this.sampling() });
    } catch (error) {
      const words = errorMessage(error);
      turn.after = words ? "failed" : `stopped, ${turn.after}`;
      if (words) this.problem.replaceChildren(notice("error", words));
      if (!turn.pieces.length) turns.splice(-2);
      if (!turn.pieces.length) this.text.value = content;
    } finally {
      this.running = null;
      this.busy(false);
      this.draw();
    }
  }

  busy(on) {
    this.sendButton.disabled = on;
    this.stopButton.disabled = !on;
    this.log.setAttribute("aria-busy", String(on));
    if (on) this.problem.replaceChildren();
  }

  async receive(turn, request) {
    const begun = performance.now();
    let first = 0;
    for await (const message of stream("InferenceService", "Generate", request, this.running.signal)) {
      if (message.tokens.length && !first) first = performance.now();
      turn.tokens += message.tokens.length;
      turn.content += message.text;
      const spelled = message.tokens.map((token) => token.text).join("");
      if (message.tokens.length > 1 && spelled === message.text) turn.pieces.push(...message.tokens.map((token) => ({ text: token.text, tokens: [token] })));
      else if (message.text || message.tokens.length) turn.pieces.push({ text: message.text, tokens: message.tokens });
      const seconds = (performance.now() - first) / 1000;
      const speed = turn.tokens > 1 && seconds > 0 ? `, ${number((turn.tokens - 1) / seconds)} tokens/s` : "";
      turn.after = `${turn.tokens} tokens${speed}, first after ${number((first - begun) / 1000)} s`;
      if (message.finish_reason !== "FINISH_REASON_UNSPECIFIED") turn.after += `, ended by ${message.finish_reason.slice(14).toLowerCase().replaceAll("_", " ")}`;
      this.extend(turn);
    }
  }

  // Append the new pieces to the last turn without redrawing the others.
  extend(turn) {
    const element = this.log.lastElementChild;
    const [body, after] = [element.querySelector(".said"), element.querySelector(".after")];
    body.append(...turn.pieces.slice(body.childElementCount).map((piece) => this.piece(piece)));
    after.textContent = turn.after;
    element.scrollIntoView({ block: "nearest" });
  }

  piece(piece) {
    const least = Math.min(0, ...piece.tokens.map((token) => token.logprob ?? 0));
    const doubt = this.doubts.checked ? DOUBTS.filter((limit) => Math.exp(least) < limit).length : 0;
    const tip = () => this.tip(element, piece);
    const element = h("span", { class: `piece doubt${doubt}`, onpointerenter: tip, onfocus: tip, onpointerleave: untip, onblur: untip, onclick: tip, tabindex: piece.tokens.length ? -1 : undefined }, piece.text);
    return element;
  }

  tip(element, { tokens }) {
    untip();
    if (!tokens.length) return;
    const share = (logprob) => `${number(100 * Math.exp(logprob), 3)} %`;
    const parts = tokens.map((token) => {
      const head = h("div", {}, h("strong", { class: "mono" }, visible(token.text)), ` ${token.logprob === undefined ? "" : `${share(token.logprob)}, log probability ${number(token.logprob)}`}`);
      const rows = (token.top_logprobs || []).map((other) => h("tr", {}, h("td", { class: "mono" }, visible(other.text)), h("td", { class: "number" }, share(other.logprob))));
      return [head, h("table", {}, h("tbody", {}, rows))];
    });
    const tip = h("div", { class: "tip", role: "tooltip" }, parts);
    document.body.append(tip);
    const box = element.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - tip.offsetWidth - 6))}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(6, box.top - tip.offsetHeight - 6)}px`;
  }

  draw() {
    untip();
    const shown = turns.map((turn) =>
      h(
        "div",
        { class: `turn ${turn.role}`, onkeydown: (event) => walk(event) },
        h("span", { class: "who" }, turn.role === "user" ? "you" : turn.model),
        h("span", { class: "said" }, turn.pieces ? turn.pieces.map((piece) => this.piece(piece)) : turn.content),
        turn.pieces ? h("span", { class: "after" }, turn.after) : null,
      ),
    );
    for (const element of shown) element.querySelector(".piece")?.setAttribute("tabindex", "0");
    this.log.replaceChildren(...(shown.length ? shown : [h("p", { class: "muted" }, "Send a message. Hover over the tokens of a reply, or move along them with the arrow keys, to see how likely each one was.")]));
  }
}

// Arrow keys move the focus from token to token.
function walk(event) {
  const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const target = next && event.target[next];
  if (!target || !target.classList.contains("piece")) return;
  event.preventDefault();
  target.focus();
}

function untip() {
  document.querySelector(".tip")?.remove();
}
