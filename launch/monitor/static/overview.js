// All runs of a home: a table to filter, to walk with j and k, and to choose runs from for an overlay.
import { ago, ask, bar, count, el, number, state } from "./format.js";

const MOST_ROWS = 500;

export class Overview {
  every = 2000;
  title = "";

  constructor() {
    this.chosen = new Set();
    this.at = 0;
    this.filter = el("input", { type: "search", placeholder: "Filter the runs  ( / )", size: 22, "aria-label": "Filter the runs",
      oninput: () => { this.at = 0; this.draw(); },
      onkeydown: (event) => { if (event.key === "Enter" && this.shown()[this.at]) this.open([this.shown()[this.at].name]); } });
    this.compare = el("button", { onclick: () => this.open([...this.chosen]) });
    this.body = el("tbody");
    this.note = el("p", { class: "note" });
    this.summary = el("span", { class: "note" });
    this.node = el("div", {},
      el("div", { class: "tools" }, this.filter, this.compare, this.summary),
      el("div", { class: "card scroll" }, el("table", { "aria-label": "Runs" },
        el("thead", {}, el("tr", {}, el("th", {}, ""), ...["run", "state"].map((name) => el("th", {}, name)),
          el("th", {}, "progress"), el("th", { class: "num" }, "loss"), el("th", { class: "wide" }, "recent loss"),
          el("th", { class: "num wide" }, "tokens/s"), el("th", { class: "num wide" }, "attempt"),
          el("th", { class: "num" }, "last sign"))), this.body), this.note));
  }

  async refresh() {
    this.data = await ask("runs");
    this.title = this.data.home;
    this.draw();
  }

  shown() {
    const word = this.filter.value.trim().toLowerCase();
    return this.data.runs.filter((run) => !word || `${run.name} ${run.state}`.toLowerCase().includes(word));
  }

  draw() {
    if (!this.data) return;
    const runs = this.shown();
    const living = this.data.runs.filter((run) => ["running", "restarting"].includes(run.state)).length;
    this.summary.textContent = `${this.data.runs.length} run${this.data.runs.length === 1 ? "" : "s"}, ${living} running` +
      (this.data.reading ? `, ${this.data.reading} still being read` : "");
    this.compare.textContent = this.chosen.size > 1 ? `Overlay ${this.chosen.size} runs` : "Choose runs to overlay";
    this.compare.disabled = this.chosen.size < 2;
    this.note.textContent = this.data.problem || this.told(runs);
    this.at = Math.min(this.at, Math.max(0, runs.length - 1));
    const focused = document.activeElement?.dataset?.run;
    this.body.replaceChildren(...runs.slice(0, MOST_ROWS).map((run, place) => this.row(run, place)));
    if (focused) this.body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  told(runs) {
    if (!this.data.runs.length) return this.data.reading ? "" : `There are no runs in ${this.data.home} yet. Start one with: pretrain train configs/quickstart.yaml`;
    if (runs.length > MOST_ROWS) return `The first ${MOST_ROWS} of ${runs.length} are shown; filter for the others.`;
    return runs.length ? "" : "No run matches.";
  }

  row(run, place) {
    const total = run.total_steps;
    const box = el("input", { type: "checkbox", "data-run": `box ${run.name}`, "aria-label": `Overlay ${run.name}`,
      onchange: (event) => { event.target.checked ? this.chosen.add(run.name) : this.chosen.delete(run.name); this.draw(); } });
    box.checked = this.chosen.has(run.name);
    return el("tr", { class: place === this.at ? "at" : "" },
      el("td", {}, box),
      el("td", {}, el("a", { href: `#/run/${run.name}`, "data-run": run.name }, run.name),
        run.reason && el("div", { class: "reason", title: run.reason }, run.reason.split("\n")[0])),
      el("td", {}, state(run.state)),
      el("td", {}, el("div", { class: "num", style: { "font-size": "12px" } }, `${run.step}${total ? ` / ${total}` : ""}`),
        total ? bar(run.step / total) : ""),
      el("td", { class: "num" }, number(run.loss)),
      el("td", { class: "wide" }, spark(run.recent_losses)),
      el("td", { class: "num wide" }, count(run.tokens_per_second)),
      el("td", { class: "num wide" }, String(run.attempt || "–")),
      el("td", { class: "num" }, ago(run.updated_at)));
  }

  open(names) {
    if (names.length) location.hash = `#/run/${names[0]}${names.length > 1 ? `?with=${names.slice(1).join(",")}` : ""}`;
  }

  key(event) {
    const runs = this.data ? this.shown() : [];
    if (event.key === "/") this.filter.focus();
    else if (event.key === "j") this.at = Math.min(runs.length - 1, this.at + 1);
    else if (event.key === "k") this.at = Math.max(0, this.at - 1);
    else if (event.key === "Enter" && runs[this.at] && document.activeElement.tagName !== "A") this.open([runs[this.at].name]);
    else return false;
    this.draw();
    this.body.children[this.at]?.scrollIntoView({ block: "nearest" });
    return true;
  }
}

function spark(values) {
  if (!values || values.length < 2) return "";
  const low = Math.min(...values), high = Math.max(...values), width = 110, height = 24;
  const points = values.map((value, place) =>
    `${((place / (values.length - 1)) * width).toFixed(1)},${(2 + (height - 4) * (1 - (value - low) / (high - low || 1))).toFixed(1)}`);
  return el("svg:svg", { width, height, role: "img", "aria-label": `loss from ${number(values[0])} to ${number(values.at(-1))}` },
    el("svg:polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 1.5 }));
}
