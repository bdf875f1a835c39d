// Shared by the figures: the data, small DOM helpers, numbers as people read them, colours, and the one tooltip.

const DATA = JSON.parse(document.getElementById("data").textContent);
const redraws = []; // functions to call when the size or the colours of the page change

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const format = {
  compact(value) {
    if (value === null || value === undefined) return "–";
    if (value < 0) return `−${format.compact(-value)}`;
    if (Number.isInteger(value) && value < 10000) return String(value);
    for (const [factor, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (value >= 0.9995 * factor) return trim((value / factor).toPrecision(3)) + unit;
    }
    if (value !== 0 && value < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(".0e", "e");
    return trim(value.toPrecision(3));
  },
  percent(value) {
    if (value === null || value === undefined) return "–";
    const shown = 100 * value;
    return (shown !== 0 && Math.abs(shown) < 10 ? trim(shown.toPrecision(2)) : trim(shown.toFixed(1))) + "%";
  },
  seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value >= 3600) return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
    if (value >= 60) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
    if (value >= 1) return trim(value.toPrecision(3)) + " s";
    if (value >= 1e-3) return trim((value * 1e3).toPrecision(3)) + " ms";
    return trim((value * 1e6).toPrecision(3)) + " µs";
  },
};

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

// Names of spans as words: forward_backward -> forward/backward.
function words(name) {
  return name === "forward_backward" ? "forward/backward" : name.replaceAll("_", " ");
}

// Round positions between low and high: about `count` of them.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(index * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

// Powers of ten between low and high; with 2 and 5 in between when those are few.
function logTicks(low, high) {
  const factors = high / low < 300 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    found.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(3))));
  }
  return found.filter((value) => value >= low && value <= high);
}

// --- colours -------------------------------------------------------------------------------------------------------

const KNOWN_SPANS = ["generate", "forward_backward", "proximal", "critic", "pack", "optimizer", "weight_update", "publish", "evaluate",
  "other", "wait", "idle"];
const EXTRA_COLOURS = ["c5", "c4", "c3", "c2", "c1"];
const AGE_COLOURS = 8;

function spanVariable(name) {
  if (name === "not traced") return "--untraced";
  if (KNOWN_SPANS.includes(name)) return `--${name}`;
  const letters = [...name].reduce((sum, letter) => sum + letter.charCodeAt(0), 0);
  return `--${EXTRA_COLOURS[letters % EXTRA_COLOURS.length]}`;
}

const isIdle = (name) => name === "idle" || name === "wait" || name === "not traced";
const ageVariable = (age) => `--a${Math.min(age, AGE_COLOURS - 1)}`;

// The value of a CSS variable, for canvases.
function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

function swatch(variable, block = false) {
  return element("span", { class: block ? "swatch block" : "swatch", style: `background:var(${variable})` });
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const redraw of redraws) redraw();
}

function startTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => applyTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    applyTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
}

// --- tooltip -------------------------------------------------------------------------------------------------------

const tooltip = document.getElementById("tooltip");

function showTooltip(event, ...content) {
  tooltip.replaceChildren(...content.filter((part) => part !== null));
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width < window.innerWidth;
  const left = right ? event.clientX + 16 : Math.max(4, event.clientX - 16 - box.width);
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - box.height - 4))}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

// A table of [variable or null, name, value] for the tooltip.
function tooltipTable(rows) {
  return element("table", {}, ...rows.map(([variable, name, value]) => element("tr", {},
    element("td", {}, ...(variable ? [swatch(variable)] : []), name), element("td", {}, value))));
}

// A group of buttons of which one is pressed.
function toggle(node, onChange) {
  node.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of node.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    onChange(button.dataset.value);
  });
}

function onResize(node, redraw) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(node.clientWidth - width) < 1) return;
    width = node.clientWidth;
    redraw();
  }).observe(node);
}
