// Before the first paint, so that a dark page never flashes white. A choice made here outlives the page.
const dark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") || (dark.matches ? "dark" : "light");
  dispatchEvent(new Event("themechange"));
}
dark.addEventListener("change", applyTheme);
applyTheme();
