// What a step was computed from: chosen by a click on a curve, or typed.
import { ask, count, el } from "./format.js";

export class Documents {
  constructor(name) {
    this.name = name;
    this.step = el("input", { type: "number", min: 1, placeholder: "step", "aria-label": "Step to read", onchange: () => this.show(Number(this.step.value)) });
    this.note = el("span", { class: "note" }, "click on a curve, or type a step  ( d )");
    this.rows = el("div", { class: "documents" });
    this.node = el("section", { class: "card", "aria-label": "Documents" }, el("h2", {}, "What a step has read"),
      el("div", { class: "tools" }, this.step, this.note), this.rows);
  }

  async show(step, most = 16) {
    this.step.value = step;
    this.note.textContent = "reading … (some seconds the first time)";
    const asked = (this.asked = {});
    let answer;
    try {
      answer = await ask("documents", { name: this.name, step, rows: most });
    } catch (error) {
      if (this.asked === asked) { this.note.textContent = error.message; this.rows.replaceChildren(); }
      return;
    }
    if (this.asked !== asked) return;
    const more = answer.rows_in_step > answer.rows.length;
    this.note.textContent = `step ${step}: ${more ? `${answer.rows.length} of ` : ""}${answer.rows_in_step} rows`;
    this.rows.replaceChildren(...answer.rows.map((row) => this.row(row)),
      ...(more && most < 256 ? [el("button", { onclick: () => this.show(step, Math.min(256, 4 * most)) }, "more rows")] : []));
  }

  row(row) {
    const where = `row ${row.row}, ${row.source}, epoch ${row.epoch}, ${row.shard}, block ${row.block}${row.masked ? ", masked" : ""}`;
    return el("details", { open: true }, el("summary", {}, where, el("small", {}, ` ${row.documents.length} document${row.documents.length === 1 ? "" : "s"}`)),
      ...row.documents.map((part) => el("div", { class: "document" },
        el("div", { class: "note" }, `${part.origin}${part.line ? `:${part.line}` : ""}, ${count(part.num_tokens)} tokens${part.begins && part.ends ? "" : ", a part"}`),
        part.source_text != null && el("pre", {}, `> ${part.source_text}`), el("pre", {}, part.text + (part.cut ? " …" : "")))));
  }
}
