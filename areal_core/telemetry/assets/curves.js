// Line charts of the metrics over steps or wall time, with a common crosshair.

const PANELS = {
  learning: [
    { title: "Accuracy", percent: true, lines: [["reward/accuracy", "training", "--c1"], ["eval/accuracy_greedy", "greedy", "--c2"],
      ["eval/accuracy_sampled", "sampled", "--c3", "eval/accuracy_sampled_standard_error"]] },
    { title: "Response length, tokens", zero: true, lines: [["response/tokens_mean", "training", "--c1"],
      ["eval/response_tokens_mean", "evaluation", "--c2"]] },
    { title: "Reward", lines: [["reward/mean", "mean", "--c1"]] },
    { title: "Entropy, nats per token", zero: true, lines: [["loss/entropy", "mean", "--c4"]] },
    { title: "Truncated responses", percent: true, lines: [["response/truncated_fraction", "share", "--c5"]] },
    { title: "Groups without contrast", zero: true, lines: [["count/zero_variance_groups", "all rewards equal", "--c5"]] },
  ],
  staleness: [
    { title: "Token age over the run, versions", zero: true, lines: [["staleness/mean", "mean", "--c1"], ["staleness/max", "oldest", "--c2"]] },
  ],
  time: [
    { title: "Tokens per second", zero: true, lines: [["rate/generated_tokens_per_s", "generated", "--c1"],
      ["rate/trained_tokens_per_s", "trained", "--c4"]] },
    { title: "Idle share of the step", percent: true, lines: [["idle/generator", "generators", "--c1"], ["idle/trainer", "trainer", "--c4"]] },
    { title: "Sequences interrupted by an update", zero: true, lines: [["count/interrupted", "per step", "--c3"]] },
  ],
  optimisation: [
    { title: "Loss", lines: [["loss/loss", "mean", "--c1"]] },
    { title: "Clipped tokens", percent: true, lines: [["loss/clip_fraction", "ratio clipped", "--c1"],
      ["loss/behavior_capped_fraction", "behaviour weight capped", "--c2"]] },
    { title: "KL divergence, nats per token", zero: true, lines: [["loss/kl_proximal_behavior", "proximal to behaviour", "--c1"],
      ["loss/kl_current_proximal", "current to proximal", "--c4"]] },
    { title: "KL to the reference, nats per token", zero: true, unless_zero: true, lines: [["loss/kl_current_reference", "mean", "--c2"]] },
    { title: "KL to the reference, nats per response", zero: true, lines: [["reward/kl_per_response", "mean", "--c2"]] },
    { title: "Behaviour weight", log: "auto", lines: [["loss/behavior_weight_mean", "mean", "--c1"], ["loss/behavior_weight_max", "largest", "--c2"]] },
    { title: "Ratio to the proximal policy", log: "auto", lines: [["loss/ratio_mean", "mean", "--c1"], ["loss/ratio_max", "largest", "--c2"]] },
    { title: "Gradient norm", zero: true, lines: [["optim/grad_norm", "before clipping", "--c3"],
      ["critic/grad_norm", "of the critic", "--c5"]] },
    { title: "Value loss", zero: true, lines: [["critic/loss", "critic", "--c5"]] },
    { title: "Learning rate", zero: true, lines: [["optim/learning_rate", "", "--c4"]] },
  ],
};
const SHOWN_ELSEWHERE = /^(time|count|tokens)\/|^version$|\/version$/;
const MARKED_EVENTS = new Set(["generator_restart", "resume", "interrupted", "failed"]);

const view = { axis: "step", window: 1, charts: [] };
const hasTime = DATA.curves.times.some((time) => time !== null);

function startCurves() {
  for (const [section, specs] of Object.entries(PANELS)) {
    const parent = document.querySelector(`#${section} > .panels`);
    for (const spec of specs) addChart(parent, spec);
  }
  const charted = new Set(Object.values(PANELS).flat().flatMap((spec) => spec.lines.flatMap(([key, , , error]) => [key, error])));
  const others = Object.keys(DATA.curves.values).filter((key) => !charted.has(key) && !SHOWN_ELSEWHERE.test(key));
  const more = document.getElementById("more");
  more.hidden = others.length === 0;
  for (const key of others) addChart(more.querySelector(".panels"), { title: key, lines: [[key, "", "--c1"]] });
  more.addEventListener("toggle", drawCharts);
  startControls();
  describeEvents();
  redraws.push(drawCharts);
}

function addChart(parent, spec) {
  const lines = spec.lines.filter(([key]) => DATA.curves.values[key] && !(spec.unless_zero && DATA.curves.values[key].every((value) => !value)));
  if (lines.length) view.charts.push(new Chart(parent, spec, lines));
}

function drawCharts() {
  for (const chart of view.charts) chart.draw();
}

function startControls() {
  const points = DATA.curves.steps.length;
  const slider = document.getElementById("smoothing");
  const text = document.getElementById("smoothing-text");
  const largest = Math.max(1, points / 4);
  const apply = () => {
    view.window = Math.max(1, Math.round(largest ** (slider.value / 100)));
    const steps = view.window * DATA.curves.bucket;
    text.textContent = steps === 1 ? "1 step" : `${steps} steps`;
    drawCharts();
  };
  slider.value = points > 8 ? Math.round((100 * Math.log(Math.max(1, points / 40))) / Math.log(Math.max(largest, 2))) : 0;
  slider.addEventListener("input", apply);
  const axis = document.getElementById("axis");
  axis.hidden = !hasTime;
  toggle(axis, (value) => {
    view.axis = value;
    drawCharts();
  });
  apply();
}

function describeEvents() {
  const marked = DATA.events.filter((event) => MARKED_EVENTS.has(event.kind) && event.step !== null);
  if (!marked.length) return;
  const kinds = [...new Set(marked.map((event) => words(event.kind)))];
  document.getElementById("event-legend").textContent = `Dashed red lines mark events (${kinds.join(", ")}).`;
}

// Moving average over `window` points, centred; missing values are left out of it and stay missing.
function smoothed(values, window) {
  if (window <= 1) return values;
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value === null ? 0 : 1));
  }
  const half = Math.floor(window / 2);
  return values.map((value, index) => {
    if (value === null) return null;
    const low = Math.max(0, index - half);
    const high = Math.min(values.length, index + half + 1);
    return (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
}

// The same for a curve most of whose values are missing: the window covers as many points of the axis, few values.
function smoothedSparse(values, window) {
  const present = values.filter((value) => value !== null);
  const few = Math.round((window * present.length) / values.length);
  if (few <= 1) return values;
  const averages = smoothed(present, few);
  let next = 0;
  return values.map((value) => (value === null ? null : averages[next++]));
}

// The value below which a share of the sorted numbers lies.
function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

class Chart {
  constructor(parent, spec, lines) {
    this.spec = spec;
    this.lines = lines.map(([key, label, variable, error]) => {
      const values = DATA.curves.values[key];
      const present = values.filter((value) => value !== null).length;
      return { key, label, variable, values, present, sparse: present < 0.5 * values.length,
        low: DATA.curves.low[key], high: DATA.curves.high[key], errors: DATA.curves.values[error] };
    });
    this.show = spec.percent ? format.percent : format.compact;
    this.caption = element("figcaption", {}, element("span", {}, spec.title));
    this.keys = this.lines.map((line) => {
      const value = element("span");
      this.caption.append(element("span", { class: "key" }, swatch(line.variable), line.label ? `${line.label} ` : "", value));
      return value;
    });
    this.picture = svg("svg", { role: "img", "aria-label": spec.title });
    this.figure = element("figure", { class: "panel" }, this.caption, this.picture);
    parent.append(this.figure);
    this.picture.addEventListener("pointermove", (event) => this.hover(event));
    this.picture.addEventListener("pointerleave", () => {
      hideTooltip();
      for (const chart of view.charts) chart.mark(null);
    });
    onResize(this.picture, () => this.draw());
  }

  draw() {
    const width = this.picture.clientWidth;
    const height = this.picture.clientHeight;
    if (!width) return; // inside a closed <details>
    this.box = { left: 46, right: width - 8, top: 8, bottom: height - 22 };
    this.xs = view.axis === "time" && hasTime ? DATA.curves.times : DATA.curves.steps;
    for (const line of this.lines) line.shown = (line.sparse ? smoothedSparse : smoothed)(line.values, view.window);
    this.scaleX();
    this.scaleY();
    const clip = `clip-${view.charts.indexOf(this)}`;
    const { left, right, top, bottom } = this.box;
    const content = svg("g", { "clip-path": `url(#${clip})` });
    this.picture.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left, y: top - 3, width: right - left + 4, height: bottom - top + 6 })),
      ...this.axes(), ...this.events(), content);
    for (const line of this.lines) this.drawLine(content, line);
    this.cross = svg("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
    this.picture.append(this.cross);
    this.mark(null);
  }

  scaleX() {
    const known = this.xs.filter((x) => x !== null);
    let [low, high] = [Math.min(...known), Math.max(...known)];
    if (!(high > low)) [low, high] = [low - 1, low + 1];
    if (low > 0 && (low <= 1 || low < 0.05 * high)) low = 0;
    const { left, right } = this.box;
    this.domain = [low, high];
    this.x = (value) => left + ((value - low) / (high - low)) * (right - left);
  }

  // The vertical range holds the thick lines fully and the thin ones but for their rarest spikes.
  scaleY() {
    const thick = this.lines.flatMap((line) => line.shown).filter((value) => value !== null);
    const thin = this.lines.flatMap((line) => line.values).filter((value) => value !== null).sort((a, b) => a - b);
    let low = Math.min(...thick, quantile(thin, 0.005));
    let high = Math.max(...thick, quantile(thin, 0.995));
    this.log = this.spec.log === "auto" && low > 0 && high / quantile(thin, 0.5) > 12;
    if ((this.spec.zero || this.spec.percent) && low >= 0) low = 0;
    if (!(high > low)) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const { top, bottom } = this.box;
    const project = this.log ? Math.log10 : (value) => value;
    const span = project(high) - project(low);
    const margin = low === 0 ? 0 : 0.04 * span;
    const [from, to] = [project(low) - margin, project(high) + 0.04 * span];
    this.range = [from, to];
    this.y = (value) => bottom - ((project(Math.max(value, this.log ? low / 10 : -Infinity)) - from) / (to - from)) * (bottom - top);
  }

  axes() {
    const { left, right, top, bottom } = this.box;
    const parts = [];
    const levels = this.log ? logTicks(...this.range.map((power) => 10 ** power)) : ticks(...this.range, 4);
    for (const level of levels) {
      const y = this.y(level);
      parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        svg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, this.show(level)));
    }
    const [unit, name] = this.timeUnit();
    for (const tick of ticks(this.domain[0] / unit, this.domain[1] / unit, Math.max(2, (right - left) / 64))) {
      parts.push(svg("text", { x: this.x(tick * unit), y: bottom + 15, "text-anchor": "middle" }, format.compact(tick)));
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    parts.push(svg("text", { class: "unit", x: left - 14, y: bottom + 15, "text-anchor": "end" }, name));
    if (this.log) parts.push(svg("text", { class: "unit", x: left + 4, y: top + 8 }, "log scale"));
    return parts;
  }

  timeUnit() {
    if (this.xs !== DATA.curves.times) return [1, "step"];
    return this.domain[1] > 7200 ? [3600, "h"] : this.domain[1] > 180 ? [60, "min"] : [1, "s"];
  }

  events() {
    const { top, bottom } = this.box;
    return DATA.events.filter((event) => MARKED_EVENTS.has(event.kind))
      .map((event) => (this.xs === DATA.curves.times ? event.time : event.step))
      .filter((at) => at !== null && at >= this.domain[0] && at <= this.domain[1])
      .map((at) => svg("line", { class: "event", x1: this.x(at), x2: this.x(at), y1: top, y2: bottom }));
  }

  drawLine(parent, line) {
    const paint = `var(${line.variable})`;
    if (line.low && !line.sparse) parent.append(svg("path", { class: "band", d: this.bandPath(line), style: `fill:${paint}` }));
    if (line.shown !== line.values) {
      parent.append(svg("path", { class: "raw", d: this.path(line.values, line.sparse), style: `stroke:${paint}` }));
    }
    parent.append(svg("path", { class: "curve", d: this.path(line.shown, line.sparse), style: `stroke:${paint}` }));
    if (line.errors) parent.append(svg("path", { class: "whisker", d: this.whiskers(line), style: `stroke:${paint}` }));
    const dotted = line.sparse && line.present < (this.box.right - this.box.left) / 9;
    const alone = (index) => (line.shown[index - 1] ?? null) === null && (line.shown[index + 1] ?? null) === null;
    line.shown.forEach((value, index) => {
      if (value !== null && this.xs[index] !== null && (dotted || (!line.sparse && alone(index)))) {
        parent.append(svg("circle", { cx: this.x(this.xs[index]), cy: this.y(value), r: 2.6, style: `fill:${paint}` }));
      }
    });
  }

  // One standard error up and down at each value.
  whiskers(line) {
    return line.values.map((value, index) => {
      const error = line.errors[index] ?? null;
      if (value === null || error === null || this.xs[index] === null) return "";
      return `M${this.x(this.xs[index]).toFixed(1)} ${this.y(value - error).toFixed(1)}V${this.y(value + error).toFixed(1)}`;
    }).join("");
  }

  path(values, bridgeGaps) {
    let text = "";
    let drawing = false;
    values.forEach((value, index) => {
      if (value === null || this.xs[index] === null) {
        drawing = drawing && bridgeGaps;
        return;
      }
      text += `${drawing ? "L" : "M"}${this.x(this.xs[index]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      drawing = true;
    });
    return text;
  }

  bandPath(line) {
    const present = line.values.map((value, index) => (value === null || this.xs[index] === null ? -1 : index)).filter((index) => index >= 0);
    const point = (bound) => (index) => `${this.x(this.xs[index]).toFixed(1)} ${this.y(bound[index]).toFixed(1)}`;
    return present.length ? `M${present.map(point(line.high)).join("L")}L${present.reverse().map(point(line.low)).join("L")}Z` : "";
  }

  hover(event) {
    const offset = event.clientX - this.picture.getBoundingClientRect().left;
    let nearest = -1;
    let distance = Infinity;
    this.xs.forEach((x, index) => {
      const away = x === null ? Infinity : Math.abs(this.x(x) - offset);
      if (away < distance) [nearest, distance] = [index, away];
    });
    if (nearest < 0) return;
    for (const chart of view.charts) chart.mark(nearest);
    const rows = this.lines.filter((line) => line.values[nearest] !== null)
      .map((line) => [line.variable, line.label || this.spec.title, this.show(line.values[nearest])]);
    const half = Math.max(DATA.curves.bucket, (DATA.curves.steps.at(-1) - DATA.curves.steps[0]) / 120) / 2;
    const step = DATA.curves.steps[nearest];
    const near = DATA.events.filter((happened) => happened.step !== null && Math.abs(happened.step - step) <= half).slice(0, 3);
    const time = hasTime && DATA.curves.times[nearest] !== null ? ` · ${format.seconds(DATA.curves.times[nearest])}` : "";
    showTooltip(event, element("b", {}, `step ${Math.round(step)}${time}`), tooltipTable(rows),
      ...near.map((happened) => element("div", { class: "faint" }, `${words(happened.kind)}: ${happened.text}`)));
  }

  // Moves the crosshair to a point; null takes it away. The keys show the values there, or the last ones.
  mark(index) {
    if (!this.xs) return;
    const x = index === null ? null : this.xs[index];
    this.cross.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) {
      this.cross.setAttribute("x1", this.x(x));
      this.cross.setAttribute("x2", this.x(x));
    }
    this.lines.forEach((line, number) => {
      const value = index === null ? line.shown.findLast((item) => item !== null) : line.shown[index];
      this.keys[number].textContent = value === null || value === undefined ? "" : this.show(value);
    });
  }
}
