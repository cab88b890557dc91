// The training jobs page: live curves of several jobs in one chart, events, cancel and resume.

import { all, stream, errorMessage, unary } from "./api.js";
import { Chart } from "./chart.js";
import { count, field, h, notice, number, options } from "./dom.js";
import { add, curvesOf } from "./stored-curves.js";

const FINAL = ["SUCCEEDED", "FAILED", "CANCELLED"];
const POLL = 5000;
const EVENTS = 500;

const state = (job) => job.state.replace("JOB_STATE_", "");

export async function show(host, { signal, rest }) {
  host.append(h("h1", {}, "Jobs"));
  const page = new Jobs(host, signal, rest[0]);
  await page.refresh();
}

class Jobs {
  constructor(host, signal, chosen) {
    Object.assign(this, { host, signal, jobs: [], watched: new Map(), stored: [], open: chosen || null, metric: "loss" });
    this.problem = h("div", {});
    this.unread = h("div", {});
    this.table = h("div", { class: "scroll" });
    this.metricSelect = h("select", { onchange: (event) => this.choose(event.target.value) }, options(["loss"], "loss"));
    this.chart = new Chart({ title: "loss", x: "step", y: "", unit: (value) => number(value, 4), height: 340, signal });
    this.events = h("ol", { class: "events", tabindex: 0, "aria-label": "events" });
    this.eventsTitle = h("h2", {}, "Events");
    const files = h("input", { type: "file", multiple: true, accept: ".json,.jsonl,.csv", onchange: (event) => this.beside(event.target.files) });
    const others = field("Beside runs of files", files, "transformers' trainer_state.json, a .csv with step and loss, or a metrics.jsonl");
    const curves = h("section", { class: "card" }, h("h2", {}, "Curves"), field("Metric", this.metricSelect), others, this.unread, this.chart.element);
    host.append(this.problem, h("section", { class: "card" }, this.table), curves, h("section", { class: "card" }, this.eventsTitle, this.events));
    const timer = setInterval(() => document.hidden || this.refresh(), POLL);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  async refresh() {
    try {
      this.jobs = await all("TrainingService", "ListTrainingJobs", "jobs", this.signal);
      this.problem.replaceChildren();
    } catch (error) {
      if (errorMessage(error)) this.problem.replaceChildren(notice("error", errorMessage(error)));
      return;
    }
    if (!this.begun && this.jobs.length) {
      this.begun = true;
      this.watch(this.open || this.jobs[0].id);
    }
    this.draw();
  }

  draw() {
    if (!this.jobs.length) {
      this.table.replaceChildren(h("p", { class: "muted" }, "No jobs yet: attn train --job NAME starts one."));
      return;
    }
    const head = h("tr", {}, ["curve", "job", "state", "progress", "loss", "validation loss", "attempt", ""].map((name) => h("th", { scope: "col" }, name)));
    const focused = this.table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const table = h("table", { class: "full" }, h("thead", {}, head), h("tbody", {}, this.jobs.map((job) => this.row(job))));
    this.table.replaceChildren(table);
    if (focused) this.table.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  row(job) {
    const now = state(job);
    const steps = Number(job.config.optimizer?.steps ?? 0);
    const metrics = job.last_metrics;
    const shown = (name) => (name in metrics ? number(metrics[name], 4) : "");
    const tick = h("input", { type: "checkbox", "data-key": `tick ${job.id}`, "aria-label": `curve of ${job.id}`, checked: this.watched.has(job.id), onchange: (event) => (event.target.checked ? this.watch(job.id) : this.unwatch(job.id)) });
    const act = (label, method, kind = "") => h("button", { type: "button", class: kind, "data-key": `${method} ${job.id}`, onclick: (event) => this.act(event.target, method, job.id) }, label);
    const kind = now === "SUCCEEDED" ? "state-good" : now === "FAILED" ? "state-bad" : "";
    return h(
      "tr",
      {},
      h("td", {}, tick),
      h("th", { scope: "row" }, job.id),
      h("td", { class: kind, title: job.error?.message ?? "" }, now.toLowerCase()),
      h("td", {}, steps ? h("progress", { max: steps, value: Number(job.step), "aria-label": `${job.step} of ${steps} steps` }) : null, ` ${count(job.step)} of ${count(steps)}`),
      h("td", { class: "number" }, shown("loss")),
      h("td", { class: "number" }, shown("validation_loss")),
      h("td", { class: "number" }, job.attempt),
      h("td", {}, FINAL.includes(now) ? (now === "SUCCEEDED" ? null : act("Resume", "ResumeTrainingJob")) : act("Cancel", "CancelTrainingJob", "danger")),
    );
  }

  async act(button, method, id) {
    button.disabled = true;
    try {
      await unary("TrainingService", method, { id }, this.signal);
      if (method === "ResumeTrainingJob" && this.watched.has(id)) this.watch(id);
    } catch (error) {
      if (errorMessage(error)) this.problem.replaceChildren(notice("error", errorMessage(error)));
      button.disabled = false;
      return;
    }
    await this.refresh();
  }

  // Follow a job from its beginning; a job that is already followed continues after the last event received.
  async watch(id) {
    const known = this.watched.get(id) ?? { id, points: {}, events: [], last: 0 };
    known.aborter?.abort();
    known.aborter = new AbortController();
    this.watched.set(id, known);
    this.open = id;
    this.signal.addEventListener("abort", () => known.aborter.abort());
    this.show();
    const body = { id, after_event_id: known.last };
    try {
      for await (const message of stream("TrainingService", "WatchTrainingJob", body, known.aborter.signal)) {
        if (message.event) this.take(known, message.event);
      }
    } catch (error) {
      if (errorMessage(error)) this.problem.replaceChildren(notice("error", `${id}: ${errorMessage(error)}`));
    }
    this.later();
  }

  unwatch(id) {
    this.watched.get(id)?.aborter.abort();
    this.watched.delete(id);
    if (this.open === id) this.open = [...this.watched.keys()].at(-1) ?? null;
    this.show();
  }

  take(known, event) {
    known.last = Number(event.id);
    if (event.metrics) {
      const step = Number(event.metrics.step);
      // An attempt that resumes from a checkpoint repeats some steps: its new values replace the old ones.
      for (const [name, value] of Object.entries(event.metrics.values)) add(known.points, name, step, Number(value));
    }
    known.events.push(event);
    if (known.events.length > EVENTS) known.events.shift();
    this.later();
  }

  // Redraw at most four times a second, however many events arrive.
  later() {
    if (this.waiting || this.signal.aborted) return;
    this.waiting = setTimeout(() => {
      this.waiting = 0;
      this.show();
    }, 250);
  }

  // Draw the curves of these files, and no longer those of earlier ones, beside the jobs'.
  async beside(files) {
    this.stored = [];
    this.unread.replaceChildren();
    for (const file of files) {
      try {
        this.stored.push({ id: file.name, points: curvesOf(file.name, await file.text()) });
      } catch (error) {
        this.unread.append(notice("error", error.message));
      }
    }
    this.show();
  }

  choose(metric) {
    this.metric = metric;
    this.show();
  }

  show() {
    const runs = [...this.watched.values(), ...this.stored];
    const metrics = [...new Set(runs.flatMap((known) => Object.keys(known.points)))].sort();
    if (!metrics.includes(this.metric)) metrics.unshift(this.metric);
    if (this.metricSelect.length !== metrics.length) this.metricSelect.replaceChildren(...options(metrics, this.metric));
    const lines = runs.filter((known) => known.points[this.metric]).map((known) => ({ label: known.id, ...known.points[this.metric] }));
    Object.assign(this.chart, { title: this.metric.replaceAll("_", " "), y: this.metric.replaceAll("_", " ") });
    this.chart.set(lines);
    const known = this.watched.get(this.open);
    this.eventsTitle.textContent = known ? `Events of ${known.id}` : "Events";
    const end = this.events.scrollTop + this.events.clientHeight >= this.events.scrollHeight - 30;
    this.events.replaceChildren(...(known?.events ?? []).map((event) => h("li", {}, sentence(event))));
    if (end) this.events.scrollTop = this.events.scrollHeight;
  }
}

function sentence(event) {
  const time = new Date(event.time).toLocaleTimeString();
  if (event.state_change) {
    const { previous, current, error } = event.state_change;
    const [from, to] = [previous, current].map((name) => name.replace("JOB_STATE_", "").toLowerCase());
    return `${time}  ${from} → ${to}${error?.message ? `: ${error.message}` : ""}`;
  }
  if (event.metrics) {
    const values = Object.entries(event.metrics.values).map(([name, value]) => `${name} ${number(Number(value), 4)}`);
    return `${time}  step ${event.metrics.step}: ${values.sort().join(", ")}`;
  }
  if (event.checkpoint) return `${time}  checkpoint of step ${event.checkpoint.step}`;
  return `${time}  ${event.log?.text ?? ""}`;
}
