// Numbers, times and elements as every page shows them.

export function count(value) {
  if (value == null) return "–";
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= 0.9995 * limit) {
      const scaled = value / limit;
      return `${scaled.toFixed(Math.abs(scaled) < 9.95 ? 1 : 0)}${suffix}`;
    }
  }
  return value.toFixed(Number.isInteger(value) || Math.abs(value) >= 99.5 ? 0 : 1);
}

export const bytes = (value) => (value == null ? "–" : `${count(value).replace("B", "G")}B`);
export const flops = (value) => (value >= 1e12 ? `${number(value / 1e12, 3)} TFLOP/s` : `${number(value / 1e9, 3)} GFLOP/s`);

export function number(value, digits = 4) {
  if (value == null) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return Number(value.toPrecision(digits)).toString();
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${two(Math.floor((whole % 86400) / 3600))}h`;
}

export const percent = (part, digits = 1) => (part == null ? "–" : `${(100 * part).toFixed(digits)} %`);
export const ago = (t) => (t == null ? "–" : `${duration(Math.max(0, Date.now() / 1000 - t))} ago`);
export const clock = (t) => (t == null ? "–" : new Date(t * 1000).toLocaleString(undefined, {
  month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }));

/** An element; text always goes in as text, so nothing of a run can become markup. */
export function el(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

export const state = (word) => el("span", { class: `state ${word}` }, word);
export const bar = (part) => el("div", { class: "bar", role: "img", "aria-label": percent(part, 0) },
  el("i", { style: { width: `${100 * Math.min(1, Math.max(0, part || 0))}%` } }));
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const kindColour = (kind) => `var(--k-${kind.replaceAll(" ", "-")})`;

export async function ask(path, parameters = {}) {
  if (globalThis.embedded) return globalThis.embedded(path, parameters);
  const response = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  const answer = response.headers.get("content-type")?.startsWith("application/json")
    ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}
