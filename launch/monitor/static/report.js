// The page of `pretrain report RUN --html FILE`: the parts of a run's page, from answers that lie in the file itself.
import { Charts } from "./charts.js";
import { el } from "./format.js";
import { attempts, changes, checkpoints, config, events, heads, heat, ledger, restarts, sources, tiles, timeline } from "./panels.js";

const answers = JSON.parse(document.getElementById("answers").textContent);

/** What the server would answer; curves are those that the file has, cut where the picture is zoomed in. */
globalThis.embedded = (path, parameters) => {
  if (path !== "curves") return answers[path];
  const levels = Object.keys(answers.smooth).map(Number), wanted = Number(parameters.smooth);
  const level = levels.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
  const low = parameters.low === "" ? -Infinity : Number(parameters.low), high = parameters.high === "" ? Infinity : Number(parameters.high);
  const cut = ([xs, ys]) => {
    const from = Math.max(0, xs.findIndex((x) => x >= low) - 1), after = xs.findIndex((x) => x > high), to = after < 0 ? xs.length : after + 1;
    return [xs.slice(from, to), ys.slice(from, to)];
  };
  const curves = {};
  for (const field of parameters.fields.split(",")) {
    const found = answers.curves[parameters.x][field];
    if (!found) continue;
    if (found.sources) { curves[field] = { sources: Object.fromEntries(Object.entries(found.sources).map(([name, line]) => [name, cut(line)])) }; continue; }
    curves[field] = { kept: cut(found.kept), ...(found.lost && { lost: cut(found.lost) }) };
    const smooth = level && answers.smooth[level][parameters.x][field];
    if (smooth) curves[field].smooth = cut(smooth);
  }
  return { curves: { [answers.run.status.name]: curves } };
};

const facts = answers.run, charts = new Charts(), log = answers.log;
charts.runs = [facts.status.name];
charts.rows = Object.fromEntries(Object.entries(facts.tables).map(([table, rows]) => [table, Object.keys(rows)]));
document.getElementById("page").replaceChildren(...[tiles(facts), ledger(facts), timeline(facts), charts.node, heat(facts), sources(facts), heads(facts),
  attempts(facts), changes(facts), restarts(facts), checkpoints(facts), events(facts), config(answers.config),
  log && el("details", { class: "card" }, el("summary", {}, log.key), el("pre", { class: "log" }, log.text))].filter(Boolean));
addEventListener("themechange", () => charts.draw());
document.addEventListener("keydown", (event) => { if (!event.target.matches("input, select") && charts.key(event)) event.preventDefault(); });
charts.load().then(() => { document.documentElement.dataset.ready = "yes"; });
