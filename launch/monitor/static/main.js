// Which page is shown, when it is read again, and what the keys do.
import { Overview } from "./overview.js";
import { Run } from "./run.js";

const page = document.getElementById("page"), where = document.getElementById("where"), pulse = document.getElementById("pulse");
const keys = document.getElementById("keys");
let shown = null, timer = 0;

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const name = path.startsWith("/run/") ? decodeURIComponent(path.slice(5)) : null;
  const overlaid = new URLSearchParams(query).get("with")?.split(",").filter((other) => other && other !== name) || [];
  shown?.close?.();
  shown = name ? new Run(name, overlaid) : new Overview();
  page.replaceChildren(shown.node);
  scrollTo(0, 0);
  tick();
}

async function tick() {
  clearTimeout(timer);
  const current = shown;
  try {
    await current.refresh();
    pulse.className = "pulse";
    pulse.textContent = `read ${new Date().toLocaleTimeString(undefined, { hour12: false })}`;
  } catch (error) {
    trouble(error);
  }
  if (current !== shown) return;
  document.documentElement.dataset.ready = "yes";
  where.textContent = current.title;
  document.title = current instanceof Run ? `${current.title} – pretrain` : "pretrain";
  timer = setTimeout(tick, document.hidden ? 15000 : current.every);
}

function trouble(error) {
  pulse.className = "pulse bad";
  pulse.textContent = error instanceof TypeError ? "the dashboard does not answer" : error.message;
}

function turnTheme() {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
}

addEventListener("hashchange", route);
addEventListener("trouble", (event) => trouble(event.detail));
document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
document.getElementById("theme").addEventListener("click", turnTheme);
document.getElementById("help").addEventListener("click", () => keys.showModal());
document.getElementById("keys-close").addEventListener("click", () => keys.close());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "?") keys.showModal();
  else if (event.key === "t") turnTheme();
  else if (event.key === "g") location.hash = "#/";
  else if (!shown?.key?.(event)) return;
  event.preventDefault();
});
route();
