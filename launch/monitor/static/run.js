// One run's page: state and ledger on top, curves (with runs overlaid), timeline, attempts, events, logs, config.
import { Charts, colour } from "./charts.js";
import { Documents } from "./documents.js";
import { ask, el } from "./format.js";
import * as panels from "./panels.js";

export class Run {
  every = 2000;

  constructor(name, overlaid) {
    this.name = name; this.title = name; this.overlaid = overlaid;
    this.charts = new Charts();
    this.charts.runs = [name, ...overlaid];
    this.charts.ahead = this.charts.over();
    this.charts.ahead.catch(() => {}); // whoever waits for it tells
    this.top = el("div"); this.below = el("div"); this.configs = el("div"); this.chips = el("div", { class: "chips" });
    this.names = el("datalist", { id: "names" });
    this.add = el("input", { list: "names", placeholder: "overlay a run  ( / )", "aria-label": "Overlay a run", size: 18, onchange: () => this.overlay(this.add.value.trim()) });
    this.charts.node.firstChild.append(el("span", { class: "space" }), this.chips, this.add, this.names);
    this.logs = new Logs(name);
    this.documents = new Documents(name);
    this.samples = new Samples(name);
    this.charts.node.addEventListener("pick", (event) => this.documents.show(event.detail));
    this.node = el("div", {}, this.top, this.charts.node, this.documents.node, this.below, this.samples.node, this.logs.node, this.configs);
    this.themed = () => { this.charts.draw(); this.drawChips(); };
    addEventListener("themechange", this.themed);
    this.drawChips();
  }

  async refresh() {
    const facts = await ask("run", { name: this.name });
    this.every = facts.living ? 2000 : 20000;
    const first = this.version === undefined;
    this.top.replaceChildren(panels.tiles(facts), panels.ledger(facts), panels.timeline(facts));
    this.charts.rows = Object.fromEntries(Object.entries(facts.tables).map(([table, rows]) => [table, Object.keys(rows)]));
    if (facts.version !== this.version || this.charts.runs.length > 1) await this.charts.load();
    if (facts.version !== this.version) {
      const open = this.below.querySelector("details[open]") !== null;
      this.below.replaceChildren(...[panels.heat(facts), el("div", { class: "pair" }, ...[panels.sources(facts), panels.heads(facts)].filter(Boolean)),
        el("div", { class: "pair" }, panels.attempts(facts), panels.events(facts)), panels.changes(facts), panels.checkpoints(facts), panels.restarts(facts), panels.pictures(facts)].filter(Boolean));
      if (open) this.below.querySelector("details")?.setAttribute("open", "");
      this.samples.refresh(facts.samples);
      this.version = facts.version;
    }
    await this.logs.refresh(facts.logs, facts.living || first);
    if (first) await this.loadOnce();
  }

  async loadOnce() {
    this.configs.replaceChildren(panels.config(await ask("config", { runs: this.charts.runs.join(",") })));
    const { runs } = await ask("runs");
    this.names.replaceChildren(...runs.filter((run) => !this.charts.runs.includes(run.name)).map((run) => el("option", { value: run.name })));
  }

  overlay(name) {
    if (name && !this.charts.runs.includes(name)) this.go([...this.overlaid, name]);
  }

  go(overlaid) {
    location.hash = `#/run/${this.name}${overlaid.length ? `?with=${overlaid.join(",")}` : ""}`;
  }

  drawChips() {
    this.chips.replaceChildren(...(this.overlaid.length ? this.charts.runs : []).map((name, place) => el("span", { class: "pick" },
      el("i", { class: "chip", style: { background: colour(place) } }), name,
      place > 0 && el("button", { "aria-label": `Remove ${name}`, onclick: () => this.go(this.overlaid.filter((other) => other !== name)) }, "×"))));
  }

  key(event) {
    if (event.key === "/") { this.add.focus(); return true; }
    if (event.key === "d") { this.documents.step.focus(); return true; }
    return this.charts.key(event);
  }

  close() {
    removeEventListener("themechange", this.themed);
    this.charts.close();
  }
}

class Logs {
  constructor(name) {
    this.name = name;
    this.choice = el("select", { "aria-label": "Log", onchange: () => this.load() });
    this.text = el("pre", { class: "log", tabindex: 0, "aria-label": "Log text" });
    this.note = el("span", { class: "note" });
    this.node = el("section", { class: "card", "aria-label": "Logs", hidden: true }, el("h2", {}, "Logs"),
      el("div", { class: "tools" }, this.choice, this.note), this.text);
  }

  async refresh(keys, load) {
    this.node.hidden = !keys.length;
    if (!keys.length) return;
    const known = [...this.choice.options].map((option) => option.value);
    if (known.join() !== keys.join()) {
      const newest = keys.filter((key) => key.endsWith("rank-00000.log")).at(-1) || keys.at(-1);
      const keep = known.length && this.choice.value !== this.newest ? this.choice.value : newest;
      this.newest = newest;
      this.choice.replaceChildren(...keys.map((key) => el("option", { value: key }, key.slice(5).replace("/", ", ").replace(".log", ""))));
      this.choice.value = keep;
    }
    if (load) await this.load();
  }

  async load() {
    const answer = await ask("log", { name: this.name, key: this.choice.value });
    const bottom = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    if (this.text.textContent !== answer.text) this.text.textContent = answer.text || "(empty)";
    this.note.textContent = answer.start ? `the last 64 KiB of ${(answer.size / 1024).toFixed(0)}` : "";
    if (bottom) this.text.scrollTop = this.text.scrollHeight;
  }
}

class Samples {
  constructor(name) {
    this.name = name; this.keys = "";
    this.choice = el("select", { "aria-label": "Samples of a step", onchange: () => this.load() });
    this.rows = el("div", { class: "written" });
    this.node = el("section", { class: "card", "aria-label": "Samples", hidden: true }, el("h2", {}, "What the model writes"), el("div", { class: "tools" }, this.choice), this.rows);
  }

  refresh(keys) {
    this.node.hidden = !keys.length;
    if (!keys.length || keys.join() === this.keys) return;
    this.keys = keys.join();
    this.choice.replaceChildren(...keys.toReversed().map((key) => el("option", { value: key }, `step ${Number(key.match(/\d+/)[0])}, ${key.includes("prompts") ? "prompts" : "held-out pairs"}`)));
    this.load();
  }

  async load() {
    const { samples } = await ask("sample", { name: this.name, key: this.choice.value });
    this.rows.replaceChildren(...samples.map((sample) => el("div", { class: "document" }, Object.entries(sample).flatMap(([name, text]) => [el("div", { class: "note" }, name), el("pre", {}, String(text))]))));
  }
}
