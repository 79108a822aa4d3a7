// Curves on uPlot: one chart per field, all of one page zoomed, smoothed and overlaid together.
import { ask, bytes, count, css, duration, el, number } from "./format.js";

const brief = (value) => (Math.abs(value) < 1 ? `${number(1000 * value, 3)} ms` : duration(value));
const GROUPS = [
  { title: "training loss", field: "loss", log: true },
  { title: "validation loss", field: "validation.loss", log: true },
  { title: "validation bits per byte", field: "validation.bits_per_byte" },
  { title: "held-out translations, BLEU", field: "validation.bleu" },
  { title: "throughput", field: "tokens_per_second", show: count },
  { title: "gradient norm", field: "gradient_norm", log: true },
  { title: "learning rate", field: "learning_rate", exact: true },
  { title: "model FLOPs utilisation", field: "mfu", show: (value) => `${(100 * value).toFixed(1)} %` },
  { title: "step time", field: "step_s", show: brief },
  { title: "where a step's time goes", many: ["data_wait_s", "forward_s", "backward_s", "optimizer_s"], unit: "s", show: brief },
  { title: "host memory", field: "host_bytes", show: bytes },
  { title: "device memory", many: ["allocated_bytes", "reserved_bytes"], unit: "bytes", show: bytes },
  { title: "own work, slowest rank / median", field: "straggling" },
  { title: "balance loss of the experts", field: "balance_loss" },
  { title: "z loss of the routers", field: "router_z_loss", log: true },
  { title: "share of the fullest expert", field: "largest_expert_share", show: (value) => `${(100 * value).toFixed(1)} %` },
  { title: "experts without a token", field: "idle_experts" },
  { title: "loss by source", table: "sources", value: "loss", log: true },
  { title: "share of rows by source", table: "sources", value: "share", also: "planned_share" },
  { title: "epochs by source", table: "sources", value: "epochs" },
  { title: "loss by objective", table: "objectives", value: "loss", log: true },
  { title: "weights by layer, L2 norm", table: "layers", value: "parameter_norm", log: true },
  { title: "updates by layer, L2 norm", table: "layers", value: "update_norm", log: true },
  { title: "activations by layer, root mean square", table: "layers", value: "activation_rms", log: true },
  { title: "attention entropy / uniform", table: "attention", value: "entropy_fraction" },
  { title: "largest attention score", table: "attention", value: "largest_score", log: true },
];
const keyOf = (group) => group.field || group.many?.join() || `${group.table}.${group.value}`;
const X = ["step", "tokens", "hours"];
const COLOURS = { light: ["#2563b0", "#c2571a", "#1f8a5f", "#8a4fb5", "#a8780a", "#b5325a", "#2b8aa0", "#6b7280"],
  dark: ["#78b0f2", "#f0955a", "#5ec795", "#c295e8", "#dfb44f", "#ef86a6", "#66c2d6", "#a4b0bd"] };
const SMOOTH = [0, 2, 5, 10, 25, 50, 100, 250, 1000];

export const colour = (place) => COLOURS[document.documentElement.dataset.theme][place % 8];

export class Charts {
  constructor() {
    this.runs = []; this.rows = {}; this.x = "step"; this.smooth = 2; this.log = false; this.lost = true; this.zoom = null;
    this.plots = new Map();
    this.kept = {}; // answers by their runs
    this.axis = el("select", { "aria-label": "Horizontal axis", onchange: () => this.set({ x: this.axis.value, zoom: null }) },
      X.map((word) => el("option", { value: word }, word)));
    this.slider = el("input", { type: "range", min: 0, max: SMOOTH.length - 1, value: this.smooth, "aria-label": "Smoothing",
      oninput: () => this.set({ smooth: Number(this.slider.value) }) });
    this.amount = el("span", { class: "num" });
    this.logs = this.toggle("log", "log y");
    this.losts = this.toggle("lost", "discarded steps");
    this.whole = el("button", { onclick: () => this.set({ zoom: null }) }, "whole range");
    this.grid = el("div", { class: "charts" });
    this.node = el("section", { "aria-label": "Curves" },
      el("div", { class: "tools" }, el("label", {}, "x", this.axis), el("label", {}, "smoothing", this.slider, this.amount),
        this.logs, this.losts, this.whole, el("span", { class: "note" }, "drag to zoom, click for the documents")), this.grid);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.grid);
    this.label();
  }

  toggle(name, text) {
    return el("button", { onclick: () => this.set({ [name]: !this[name] }) }, text);
  }

  set(change) {
    Object.assign(this, change);
    this.turned = true; this.ahead = null; // it is to be drawn anew, also from what is at hand
    this.label();
    this.load().catch((error) => dispatchEvent(new CustomEvent("trouble", { detail: error })));
  }

  label() {
    this.axis.value = this.x; this.slider.value = this.smooth;
    this.amount.textContent = this.smooth ? `±${SMOOTH[this.smooth]}` : "off";
    this.logs.setAttribute("aria-pressed", this.log); this.losts.setAttribute("aria-pressed", this.lost);
    this.whole.hidden = !this.zoom;
  }

  async load() {
    const asked = (this.asked = {});
    this.meanings ??= ask("fields");
    const first = this.part(this.runs.slice(0, 1), GROUPS.flatMap((group) => this.fields(group)));
    const [own, laid, meanings] = await Promise.all([first, this.ahead || this.over(), this.meanings]);
    this.ahead = null;
    if (this.asked !== asked || (own.unchanged && laid.unchanged && !this.turned)) return;
    this.turned = false;
    this.answer = { curves: { ...own.curves, ...laid.curves } };
    this.named = meanings;
    this.draw();
  }

  /** Of runs laid over the first only what is drawn of several; asked for while the first one's page is still made. */
  over() {
    return this.part(this.runs.slice(1), GROUPS.filter((group) => group.field).map((group) => group.field));
  }

  async part(runs, fields) {
    if (!runs.length) return { unchanged: true };
    const [low, high] = this.zoom || ["", ""];
    const wanted = { runs: runs.join(","), fields: fields.join(","), x: this.x, low, high,
      points: Math.round(Math.min(1200, 2400 / this.runs.length)), smooth: SMOOTH[this.smooth] };
    const key = JSON.stringify(wanted), kept = this.kept[wanted.runs]?.key === key ? this.kept[wanted.runs].answer : null;
    const answer = await ask("curves", { ...wanted, known: Object.values(kept?.versions || {}).join(",") });
    if (answer.unchanged) return { ...kept, unchanged: true };
    this.kept[wanted.runs] = { key, answer };
    return answer;
  }

  /** The fields that a chart shows; a table has one for each of its rows. */
  fields(group) {
    if (group.field) return [group.field];
    if (group.many) return group.many;
    return (this.rows[group.table] || []).flatMap((row) => [group.value, group.also].filter(Boolean).map((value) => `${group.table}.${row}.${value}`));
  }

  draw() {
    if (!this.answer) return;
    for (const group of GROUPS) {
      const lines = this.lines(group);
      const old = this.plots.get(keyOf(group));
      if (!lines.length) { old?.card.remove(); old?.plot.destroy(); this.plots.delete(keyOf(group)); continue; }
      const shape = JSON.stringify([lines.map((line) => [line.label, line.dash, line.stroke, line.points]), this.x, this.log,
        document.documentElement.dataset.theme]);
      if (old?.shape === shape) { old.plot.setData(this.data(group, lines)); this.value(old, group, lines); continue; }
      this.make(group, lines, shape);
    }
    this.order();
  }

  lines(group) {
    if (!group.field) return this.severalLines(group);
    const lines = [], many = this.runs.length > 1;
    this.runs.forEach((run, place) => {
      const found = this.answer.curves[run]?.[group.field], main = colour(place), name = many ? run : "";
      if (!found) return;
      if (found.sources) {
        Object.entries(found.sources).forEach(([source, line], at) => lines.push({ label: [name, source].filter(Boolean).join(" "), line,
          stroke: many ? main : colour(at + 1), width: 1.8, points: true, dash: many && at ? [5, 3] : undefined }));
        return;
      }
      if (!found.kept[0].length) return;
      if (this.lost && found.lost) lines.push({ label: `${name} discarded`.trim(), line: found.lost, lost: true, stroke: css("--faint"), width: 1, dash: [4, 3] });
      const soft = Boolean(found.smooth) && !group.exact;
      const crowd = soft && this.runs.length > 2; // of many runs the smoothed lines alone can be told apart
      if (!crowd) lines.push({ label: soft ? `${name} each step`.trim() : name || "value", line: found.kept, stroke: soft ? `${main}55` : main, width: soft ? 1 : 1.7,
        points: found.kept[0].length === 1 });
      if (soft) lines.push({ label: name || "mean", line: found.smooth, stroke: main, width: 2 });
    });
    return lines;
  }

  /** One line per field: of several runs those of the first alone, or nobody could read it. */
  severalLines(group) {
    const found = this.answer.curves[this.runs[0]] || {}, fields = this.fields(group).filter((field) => found[field]?.kept[0].length);
    const stride = Math.max(1, Math.ceil(fields.length / 8));
    return fields.filter((_, at) => at % stride === 0 || at === fields.length - 1).map((field, at) => {
      const planned = group.also && field.endsWith(group.also), own = found[field];
      const label = group.many ? field.replace(/_(s|bytes)$/, "").replaceAll("_", " ") : field.slice(group.table.length + 1).replace(/\.\w+$/, "") + (planned ? " planned" : "");
      const shown = group.also ? Math.floor(at / 2) : at;
      return { label, line: own.smooth && !planned && group.table !== "layers" ? own.smooth : own.kept, stroke: colour(shown), width: planned ? 1 : 1.7,
        dash: planned ? [5, 3] : undefined, points: own.kept[0].length < 2 };
    });
  }

  data(group, lines) {
    const log = this.log && group.log;
    // 2: a gap reaches to the next point of its own line, past those of the others.
    return uPlot.join(lines.map(({ line }) => [line[0], log ? line[1].map((value) => (value > 0 ? value : null)) : line[1]]), lines.map(() => [1, 2]));
  }

  make(group, lines, shape) {
    const old = this.plots.get(keyOf(group));
    old?.plot.destroy(); old?.card.remove();
    const meaning = this.named[group.field || `${group.table}.${group.value}`] || { unit: group.unit };
    const box = el("div", { class: "plot" }), value = el("span", { class: "value" });
    const card = el("div", { class: "card", "data-field": keyOf(group) },
      el("h2", { title: meaning.meaning }, group.title, el("small", {}, meaning.unit === "1" ? "" : meaning.unit || ""), value), box);
    this.grid.append(card);
    const show = group.show || number, axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false } };
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: 230,
      scales: { x: { time: false, range: (u, low, high) => this.zoom || (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: this.log && group.log ? 3 : 1 } },
      axes: [{ ...axis, size: 34, values: (u, marks) => marks.map((mark) => this.x === "hours" ? number(mark) : count(mark)) },
        { ...axis, size: 62, values: (u, marks) => marks.map((mark) => (mark == null ? "" : show(mark))) }],
      series: [{ label: this.x, value: (u, at) => (at == null ? "–" : this.x === "step" ? at : number(at)) },
        // A spike that was undone leaves the frame instead of flattening the line that counts.
        ...lines.map((line) => ({ label: line.label, auto: !line.lost || this.x === "hours", stroke: line.stroke, width: line.width, dash: line.dash,
          points: { show: Boolean(line.points), size: 6, fill: line.stroke },
          value: (u, at) => (at == null ? "–" : show(at)) }))],
      cursor: { sync: { key: "curves" }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { this.set({ zoom: null }); return null; } } },
      hooks: { setSelect: [(u) => {
        if (u.select.width < 6) return;
        const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        this.set({ zoom: [low, high] });
      }] },
    }, this.data(group, lines), box);
    plot.over.addEventListener("click", () => {
      const at = plot.cursor.idx;
      if (this.x === "step" && at != null) this.node.dispatchEvent(new CustomEvent("pick", { detail: Math.round(plot.data[0][at]) }));
    });
    const entry = { plot, card, shape, box, shown: value };
    this.plots.set(keyOf(group), entry);
    this.value(entry, group, lines);
  }

  value(entry, group, lines) {
    const last = group.field && (lines.length === 1 || this.runs.length === 1) ? lines.at(-1).line[1].findLast((at) => at != null) : null;
    entry.shown.textContent = last == null ? "" : (group.show || number)(last);
  }

  order() {
    let before = null;
    for (const group of GROUPS) {
      const card = this.plots.get(keyOf(group))?.card;
      if (!card) continue;
      if (before ? before.nextSibling !== card : this.grid.firstChild !== card) this.grid.insertBefore(card, before ? before.nextSibling : this.grid.firstChild);
      before = card;
    }
  }

  resize() {
    for (const { plot, box } of this.plots.values()) {
      const width = Math.max(200, box.clientWidth);
      if (Math.abs(width - plot.width) > 1) plot.setSize({ width, height: 230 });
    }
  }

  key(event) {
    if (event.key === "l") this.set({ log: !this.log });
    else if (event.key === "0") this.set({ zoom: null });
    else if (event.key === "s") this.set({ smooth: Math.min(SMOOTH.length - 1, this.smooth + 1) });
    else if (event.key === "S") this.set({ smooth: Math.max(0, this.smooth - 1) });
    else if (event.key === "x") this.set({ x: X[(X.indexOf(this.x) + 1) % X.length], zoom: null });
    else return false;
    return true;
  }

  close() {
    this.observer.disconnect();
    for (const { plot } of this.plots.values()) plot.destroy();
    this.plots.clear();
  }
}
