// Parts of a run's page that are made anew from its facts: tiles, ledger, timeline, attempts, events, config.
import { ago, bar, bytes, clock, count, duration, el, flops, kindColour, number, percent, state } from "./format.js";

const PHASES = ["notice", "end", "wait", "spawn", "load", "first step"];

export function tiles(facts) {
  const { status, values, ledger, validation, checkpoints } = facts;
  const bits = Object.entries(validation).find(([, row]) => row.bits_per_byte != null);
  const scored = Object.values(validation).find((row) => row.bleu != null);
  const saved = checkpoints.at(-1);
  const rows = [
    ["loss", number(status.loss)],
    bits && [`bits/byte, ${bits[0]}`, number(bits[1].bits_per_byte)],
    scored && ["BLEU", number(scored.bleu)],
    ["tokens/s", count(status.tokens_per_second)],
    values.mfu != null && ["MFU", percent(values.mfu), `of ${flops(values.peak_flops)} a rank${values.hfu > values.mfu ? `; with recomputation ${percent(values.hfu)}` : ""}`],
    values.largest_expert_share != null && ["fullest expert", percent(values.largest_expert_share),
      values.idle_experts ? `${values.idle_experts} without a token` : "each has tokens"],
    values.host_bytes != null && ["host memory", bytes(values.host_bytes)],
    facts.living ? ["time left", duration(values.eta_s)] : ["tokens seen", count(values.tokens)],
    ["goodput", percent(ledger.goodput)],
    ["attempts", String(status.attempt || "–")],
    ["last checkpoint", saved ? (facts.living ? ago(saved.t) : `step ${saved.step}`) : "–"],
  ];
  const part = status.total_steps ? status.step / status.total_steps : 0;
  return el("section", { class: "card", "aria-label": "State" },
    el("div", { class: "head" }, el("h1", {}, status.name), state(status.state),
      el("span", { class: "note" }, facts.living ? `last sign ${ago(status.updated_at)}` : `ended ${ago(status.updated_at)}`)),
    status.reason && el("p", { class: ["failed", "damaged", "lost"].includes(status.state) ? "error" : "note", style: { "white-space": "pre-wrap" } }, status.reason),
    el("div", { class: "progress" }, el("div", { class: "note num", style: { "text-align": "left", "margin-bottom": "4px" } },
      `step ${status.step.toLocaleString("en")}${status.total_steps ? ` of ${status.total_steps.toLocaleString("en")}, ${percent(part, 0)}` : ""}`), bar(part)),
    el("div", { class: "tiles" }, rows.filter(Boolean).map(([name, value, more]) => el("div", { class: "tile", title: more }, el("b", {}, value), el("span", {}, name)))),
    facts.warnings.length > 0 && el("details", { class: "warned" }, el("summary", {}, `${facts.warnings.length} warnings about attention heads`),
      el("ul", {}, facts.warnings.slice(0, 100).map((word) => el("li", {}, word)))));
}

export function ledger(facts) {
  const { seconds, wall_s: wall } = facts.ledger;
  const spent = Object.entries(seconds).filter(([, value]) => value > 0 && value / wall >= 0.00005);
  return el("section", { class: "card", "aria-label": "Where the time went" },
    el("h2", {}, `Where ${duration(wall)} went`),
    el("div", { class: "stack", role: "img", "aria-label": spent.map(([kind, value]) => `${kind} ${percent(value / wall)}`).join(", ") },
      spent.map(([kind, value]) => el("i", { title: `${kind}: ${duration(value)}, ${percent(value / wall)}`,
        style: { width: `${(100 * value) / wall}%`, background: kindColour(kind) } }))),
    el("div", { class: "legend" }, spent.map(([kind, value]) => el("span", {}, el("i", { style: { background: kindColour(kind) } }),
      kind, el("small", {}, `${duration(value)} · ${percent(value / wall)}`)))));
}

export function timeline(facts) {
  const spans = facts.timeline;
  if (!spans.length) return el("div");
  const start = spans[0].start, end = spans.at(-1).end, width = 1000;
  const place = (t) => (width * (t - start)) / (end - start || 1);
  const svg = el("svg:svg", { class: "time", viewBox: `0 0 ${width} 74`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${facts.attempts.length} attempts, ${facts.events.filter((event) => event.kind === "fault").length} faults` });
  for (const span of spans) svg.append(titled(el("svg:rect", { x: place(span.start), y: 20, height: 26, style: { fill: kindColour(span.kind) },
    width: Math.max(0.4, place(span.end) - place(span.start)) }),
    `attempt ${span.attempt}: ${span.kind}, ${duration(span.end - span.start)} from ${clock(span.start)}`));
  for (const attempt of facts.attempts) svg.append(titled(mark(place(attempt.started_at), 14, 20, "var(--soft)"),
    `attempt ${attempt.attempt} starts: ${attempt.why}`));
  for (const saved of facts.checkpoints) svg.append(titled(mark(place(saved.t), 48, 55, "var(--k-checkpoint-stall)"),
    `${saved.checkpoint}, ${clock(saved.t)}`));
  for (const event of facts.events.filter((each) => each.kind === "rolled_back")) svg.append(titled(mark(place(event.t), 6, 46, "var(--warn)", 3),
    `${clock(event.t)} ${told(event)}`));
  for (const event of facts.events.filter((each) => each.kind === "fault")) svg.append(titled(mark(place(event.t), 0, 46, "var(--bad)", 3),
    `${clock(event.t)} ${event.cause}: ${event.message}`));
  return el("section", { class: "card", "aria-label": "Timeline" }, el("h2", {}, "Timeline"), svg,
    el("div", { class: "legend" }, el("small", {}, clock(start)), legend("var(--soft)", "attempt starts"), legend("var(--bad)", "fault"), legend("var(--warn)", "rollback"),
      legend("var(--k-checkpoint-stall)", "checkpoint"), el("small", { style: { "margin-left": "auto" } }, clock(end))));
}

const titled = (node, text) => { node.append(el("svg:title", {}, text)); return node; };
const legend = (fill, text) => el("span", {}, el("i", { style: { background: fill } }), el("small", {}, text));
const mark = (x, y, bottom, fill, wide = 2) => el("svg:rect", { x: x - wide / 2, y, width: wide, height: bottom - y, style: { fill } });

export function attempts(facts) {
  return el("section", { class: "card scroll", "aria-label": "Attempts" }, el("h2", {}, "Attempts"),
    table(["#", "ranks", "from", "to", "kept to", "time", "outcome"], facts.attempts.toReversed().map((attempt) => {
      const kept = attempt.kept_step == null || attempt.last_step == null ? attempt.last_step : Math.min(attempt.last_step, attempt.kept_step);
      return [attempt.attempt, attempt.ranks, attempt.restored_step, attempt.last_step ?? "–", kept ?? "–",
        duration((attempt.ended_at ?? Date.now() / 1000) - attempt.started_at), attempt.cause ? `${attempt.outcome}: ${attempt.cause}` : attempt.outcome];
    })));
}

export function changes(facts) {
  const rows = facts.attempts.toReversed().flatMap((attempt) => attempt.changes.map((change) => [attempt.attempt, clock(attempt.started_at), change]));
  if (!rows.length) return null;
  return el("section", { class: "card scroll", "aria-label": "Config changes" }, el("h2", {}, "Config changes between attempts"), table(["from attempt", "since", "field: old → new (what that does)"], rows));
}

export function restarts(facts) {
  if (!facts.ledger.restarts.length) return null;
  return el("section", { class: "card scroll", "aria-label": "Restarts" }, el("h2", {}, "Restarts by cause and phase"),
    table(["to attempt", "cause", ...PHASES, "rework", "total"], facts.ledger.restarts.toReversed().map((restart) => [restart.attempt, restart.cause,
      ...PHASES.map((phase) => (restart.phases[phase] ? duration(restart.phases[phase]) : "–")), duration(restart.rework_s), duration(restart.seconds)])));
}

export function events(facts) {
  const rows = facts.events.toReversed();
  return el("section", { class: "card", "aria-label": "Faults, checkpoints and changes" }, el("h2", {}, "Faults, checkpoints, changes"),
    rows.length ? el("ul", { class: "feed" }, rows.map((event) => el("li", { class: event.kind === "fault" || event.kind === "failed" ? "fault" : "" },
      el("time", {}, clock(event.t)), el("span", { class: "mono", title: event.log_tail || "" }, told(event))))) : el("p", { class: "note" }, "Nothing yet."));
}

function told(event) {
  switch (event.kind) {
    case "committed": return event.count ? `saved ${event.count} checkpoints, ${event.first} to ${event.checkpoint}` : `saved ${event.checkpoint}`;
    case "restored": return `attempt ${event.attempt} restored ${event.checkpoint}`;
    case "fault": return `${event.cause} fault in attempt ${event.attempt}: ${event.message}`;
    case "rolled_back": return `rolled back at step ${event.step} to ${event.to_step}, jumps over rows ${(event.rows || []).join(" to ")}: ${event.why}`;
    case "step_rerun": return `computed step ${event.step} again: the fault is of the ${event.verdict} (${event.why})`;
    case "straggler": return `rank ${event.rank} on ${event.host} is slow: ${number(event.median_s)} s of own work a step, others ${number(event.others_median_s)} s`;
    case "save_failed": return `save of ${event.checkpoint} failed: ${event.message}`;
    case "config_changed": return `config: ${(event.changes || []).join("; ")}`;
    default: return `${event.kind}${event.step == null ? "" : ` at step ${event.step}`}${event.reason ? `: ${event.reason}` : ""}`;
  }
}

export function config(answer) {
  const { runs, fields } = answer, many = runs.length > 1;
  const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = Object.entries(fields).filter(([, values]) => !many || new Set(values.map(text)).size > 1);
  return el("details", { class: "card", open: many }, el("summary", {}, many ? `Config: ${rows.length} fields differ` : "Config"),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "field"), runs.map((run) => el("th", {}, many ? run : "value")))),
      el("tbody", {}, rows.map(([name, values]) => el("tr", { class: many ? "differs" : "" }, el("td", { class: "mono" }, name),
        values.map((value) => el("td", { class: "mono" }, text(value)))))))));
}

function table(head, rows) {
  const right = head.map((_, column) => rows.every((row) => /^[\d.–]|^$/.test(String(row[column]))) ? "num" : "");
  return el("table", {}, el("thead", {}, el("tr", {}, head.map((name, column) => el("th", { class: right[column] }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, column) => el("td", { class: right[column] }, String(cell)))))));
}

/** Ranks as a heat map: own work over the median of all ranks at that time; a straggler is a dark row. */
export function heat(facts) {
  const { steps, ratio, attempt } = facts.heat;
  if (!steps.length || ratio[0].length < 2) return null;
  const ranks = ratio[0].length, cell = Math.max(2, Math.min(18, Math.floor(220 / ranks))), height = ranks * cell;
  const canvas = el("canvas", { width: steps.length, height: ranks, class: "heat", style: { height: `${height}px` }, role: "img",
    "aria-label": `own work of ${ranks} ranks, attempt ${attempt}; slowest now ${number(Math.max(...ratio.at(-1)))} times the median` });
  const context = canvas.getContext("2d"), image = context.createImageData(steps.length, ranks);
  ratio.forEach((row, x) => row.forEach((value, rank) => image.data.set(shade(value), 4 * (rank * steps.length + x))));
  context.putImageData(image, 0, 0);
  const note = el("span", { class: "note" }, "each row a rank, each column a time; hover for numbers");
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(steps.length - 1, Math.floor((steps.length * (event.clientX - box.left)) / box.width));
    const rank = Math.min(ranks - 1, Math.floor((ranks * (event.clientY - box.top)) / box.height));
    note.textContent = `step ${steps[x]}, rank ${rank}: ${number(ratio[x][rank])} times the median`;
  });
  const slow = ratio.at(-1).map((value, rank) => [value, rank]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  return el("section", { class: "card", "aria-label": "Ranks" }, el("h2", {}, `Ranks: own work over the median, attempt ${attempt}`), canvas,
    el("div", { class: "legend" }, [0.5, 1, 1.5, 2, 4].map((value) => el("span", {}, el("i", { style: { background: `rgba(${shade(value).slice(0, 3)})` } }), el("small", {}, `× ${value}`))), note),
    el("p", { class: "note" }, `slowest now: ${slow.map(([value, rank]) => `rank ${rank} (× ${number(value, 3)})`).join(", ")}`));
}

function shade(value) {
  const far = Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-3)) / 2));
  const end = far > 0 ? [190, 36, 48] : [48, 110, 190], middle = [206, 212, 220], part = Math.abs(far);
  return [...middle.map((from, place) => Math.round(from + (end[place] - from) * part)), 255];
}

export function sources(facts) {
  const rows = Object.entries(facts.tables.sources || {});
  if (!rows.length) return null;
  return el("section", { class: "card scroll", "aria-label": "Data" }, el("h2", {}, "Data: mixture, epochs, loss by source"),
    table(["source", "share of rows", "planned", "epochs", "loss"], rows.map(([name, row]) => [name, percent(row.share, 2), percent(row.planned_share, 2), number(row.epochs, 3), number(row.loss)])));
}

export function checkpoints(facts) {
  if (!facts.checkpoints.length) return null;
  const copy = facts.values.memory_copy_step;
  return el("section", { class: "card scroll", "aria-label": "Checkpoints" }, el("h2", {}, "Checkpoints", copy != null ? el("small", {}, ` newest copy in memory: step ${copy}`) : ""),
    table(["checkpoint", "age", "size", "tier", "stall", "written in", "verified"], facts.checkpoints.slice(-12).toReversed().map((saved) => [saved.checkpoint, ago(saved.t),
      saved.bytes ? bytes(saved.bytes) : "–", saved.tier, saved.stall_s == null ? "–" : duration(saved.stall_s), saved.write_s == null ? "–" : duration(saved.write_s), saved.verified])));
}

export function heads(facts) {
  const rows = Object.entries(facts.tables.attention || {});
  if (!rows.length) return null;
  return el("section", { class: "card scroll", "aria-label": "Attention" }, el("h2", {}, "Attention of a document of the last look"),
    table(["layer", "entropy / uniform", "least", "most", "largest score", "most fixed"], rows.map(([name, row]) => [name, percent(row.entropy_fraction), percent(row.lowest_entropy_fraction),
      percent(row.highest_entropy_fraction), number(row.largest_score, 3), percent(row.top_share)])));
}

export function pictures(facts) {
  if (!facts.pictures.length) return null;
  return el("details", { class: "card" }, el("summary", {}, `Pictures: ${facts.pictures.length} (loss curve, attention maps)`),
    facts.pictures.map((key) => el("figure", {}, el("img", { src: `/picture?${new URLSearchParams({ name: facts.status.name, key })}`, alt: key, loading: "lazy" }), el("figcaption", { class: "note" }, key.slice(6)))));
}
