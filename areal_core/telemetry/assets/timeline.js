// The timeline: a row per process and track, drawn on a canvas; an overview of the whole run below it.

const LABEL_WIDTH = 118;
const IDLE_WIDTH = 74;

function startTimeline() {
  const parent = document.getElementById("timeline");
  const trace = DATA.timeline;
  if (!trace.rows.length || !trace.duration) {
    parent.append(element("p", { class: "empty" }, "No trace was recorded."));
    return;
  }
  new TimelineView(parent, trace);
}

// Rows as sorted arrays: segment i runs from starts[i] to ends[i].
function unpackRow(row, names, alone) {
  const count = row.flat.length / 4;
  const unpacked = { ...row, starts: new Float64Array(count), ends: new Float64Array(count), names: new Int32Array(count), details: new Int32Array(count) };
  let time = 0;
  for (let index = 0; index < count; index += 1) {
    const [gap, duration, name, detail] = row.flat.slice(4 * index, 4 * index + 4);
    unpacked.starts[index] = time + gap;
    time = unpacked.ends[index] = time + gap + duration;
    unpacked.names[index] = name;
    unpacked.details[index] = detail;
  }
  unpacked.label = alone ? row.process : `${row.process} · ${row.track}`;
  unpacked.canIdle = unpacked.names.some((name) => isIdle(names[name]));
  return unpacked;
}

// Index of the first segment that ends after `time`.
function firstEndingAfter(row, time) {
  let [low, high] = [0, row.ends.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

class TimelineView {
  constructor(parent, trace) {
    this.trace = trace;
    const alone = (row) => trace.rows.filter((other) => other.process === row.process).length === 1;
    this.rows = trace.rows.map((row) => unpackRow(row, trace.names, alone(row)));
    this.rowHeight = this.rows.length > 16 ? 14 : 26;
    this.rowGap = this.rows.length > 16 ? 3 : 6;
    this.overviewRow = this.rows.length > 8 ? 3 : 7;
    this.order = trace.names.map((_, index) => index).sort((a, b) => this.rank(a) - this.rank(b));
    this.main = element("canvas", { class: "main", tabindex: "0", role: "img", "aria-label": "Timeline of generators and trainer; arrow keys move, plus and minus zoom" });
    this.overview = element("canvas", { class: "overview", "aria-hidden": "true" });
    parent.append(element("div", { class: "timeline" }, this.head(), this.main, this.overview), this.describe());
    this.range = this.firstRange();
    this.listen();
    onResize(this.main, () => this.schedule());
    redraws.push(() => this.schedule());
  }

  rank(index) {
    const known = KNOWN_SPANS.indexOf(this.trace.names[index]);
    return known < 0 ? 8.5 : known;
  }

  head() {
    const names = this.order.map((index) => this.trace.names[index]);
    const busy = names.filter((name) => !isIdle(name)).map((name) => [name, words(name)]);
    const idle = names.filter(isIdle);
    const keys = element("span", { class: "keys" }, ...[...busy, ...(idle.length ? [[idle[0], idle.map(words).join(", ")]] : [])]
      .map(([name, text]) => element("span", {}, swatch(spanVariable(name), true), text)));
    const button = (text, title, act) => {
      const node = element("button", { type: "button", title }, text);
      node.addEventListener("click", act);
      return node;
    };
    return element("div", { class: "timeline-head" }, keys, element("span", { class: "buttons" },
      button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)),
      button("a few steps", "Show a few training steps", () => this.show(...this.firstRange())),
      button("whole run", "Show the whole run", () => this.show(0, this.trace.duration))));
  }

  describe() {
    const texts = ["Who was busy with what. Grey is idle time; its share of the visible stretch stands at the right. Where segments are",
      "narrower than a pixel, the height of a colour is its share of the time. Drag to move, Ctrl + wheel to zoom, double-click to look closer;",
      "the strip below shows the whole run."];
    if (this.trace.excerpts.length) {
      const length = format.seconds((this.trace.excerpts[0][1] - this.trace.excerpts[0][0]) / 1e6);
      texts.push(`Of this long run the first, the middle and the last ${length} can be seen span by span; the rest as shares of time.`);
    }
    if (this.trace.dropped) texts.push(`The trace is full: ${format.compact(this.trace.dropped)} later events were dropped.`);
    return element("p", { class: "caption" }, texts.join(" "));
  }

  // A few steps from the middle of the run, beginning where the trainer begins to wait.
  firstRange() {
    const row = this.rows.find((candidate) => candidate.process === "trainer") ?? this.rows[0];
    const wait = this.trace.names.indexOf("wait");
    const begins = [...row.starts.keys()].filter((index) => row.names[index] === (wait < 0 ? row.names[0] : wait));
    if (begins.length < 12) return [0, this.trace.duration];
    const middle = Math.floor(begins.length * 0.45);
    return [row.starts[begins[middle]], row.starts[begins[Math.min(middle + 8, begins.length - 1)]]];
  }

  // Whether the segments of this stretch are known, not only its profile.
  isDetailed([from, to]) {
    const { excerpts } = this.trace;
    return !excerpts.length || excerpts.some(([start, end]) => from >= start && to <= end);
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, 20), this.trace.duration);
    const start = Math.min(Math.max(from, 0), this.trace.duration - span);
    this.range = [start, start + span];
    this.schedule();
  }

  zoom(factor, share = 0.5) {
    const [from, to] = this.range;
    const fixed = from + share * (to - from);
    this.show(fixed - (fixed - from) * factor, fixed + (to - fixed) * factor);
  }

  listen() {
    const { main, overview } = this;
    const share = (event) => {
      const box = main.getBoundingClientRect();
      return (event.clientX - box.left - LABEL_WIDTH) / (box.width - LABEL_WIDTH - IDLE_WIDTH);
    };
    let grabbed = null;
    main.addEventListener("pointerdown", (event) => {
      grabbed = { at: share(event), range: this.range };
      main.setPointerCapture(event.pointerId);
    });
    main.addEventListener("pointermove", (event) => {
      if (grabbed === null) return this.explain(event, share(event));
      const [from, to] = grabbed.range;
      const moved = (grabbed.at - share(event)) * (to - from);
      hideTooltip();
      return this.show(from + moved, to + moved);
    });
    for (const end of ["pointerup", "pointercancel"]) main.addEventListener(end, () => { grabbed = null; });
    main.addEventListener("pointerleave", hideTooltip);
    main.addEventListener("dblclick", (event) => this.zoom(0.4, share(event)));
    main.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom(1.0015 ** event.deltaY, share(event));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.move(event.deltaX / main.clientWidth);
      }
    }, { passive: false });
    main.addEventListener("keydown", (event) => {
      const acts = { ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
        "-": () => this.zoom(2), Home: () => this.show(0, this.range[1] - this.range[0]), 0: () => this.show(0, this.trace.duration) };
      if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      acts[event.key]();
    });
    const centre = (event) => {
      if (!(event.buttons & 1)) return;
      const half = (this.range[1] - this.range[0]) / 2;
      this.show(share(event) * this.trace.duration - half, share(event) * this.trace.duration + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); centre(event); });
    overview.addEventListener("pointermove", centre);
  }

  move(share) {
    const [from, to] = this.range;
    this.show(from + share * (to - from), to + share * (to - from));
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    const width = this.main.clientWidth;
    if (!width) return;
    this.paint = this.trace.names.map((name) => colour(spanVariable(name)));
    this.ink = colour("--ink");
    this.soft = colour("--soft");
    const step = this.rowHeight + this.rowGap;
    const height = this.rows.length * step + 24;
    const context = this.prepare(this.main, width, height);
    const [left, right] = [LABEL_WIDTH, width - IDLE_WIDTH];
    this.rows.forEach((row, index) => {
      const y = index * step + 2;
      context.fillStyle = colour("--untraced");
      context.fillRect(left, y, right - left, this.rowHeight);
      this.drawRow(context, row, y, this.rowHeight, left, right, this.range, true);
      this.drawLabels(context, row, y, left, right);
    });
    this.drawInstants(context, left, right, step);
    this.drawTimes(context, left, right, height);
    this.drawOverview(width, left, right);
  }

  prepare(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `11.5px ${colour("--sans")}`;
    context.textBaseline = "middle";
    return context;
  }

  drawRow(context, row, y, height, left, right, range, labels) {
    const [from, to] = range;
    if (!this.isDetailed(range)) {
      this.drawStacks(context, this.profileColumns(row, range, Math.ceil(right - left)), y, height, left);
      return;
    }
    const first = firstEndingAfter(row, from);
    let last = first;
    while (last < row.starts.length && row.starts[last] < to) last += 1;
    const scale = (right - left) / (to - from);
    if (last - first > (right - left) / 3) {
      this.drawStacks(context, this.segmentColumns(row, first, last, Math.ceil(right - left), from, scale), y, height, left);
      return;
    }
    for (let index = first; index < last; index += 1) {
      const start = Math.max(left, left + (row.starts[index] - from) * scale);
      const end = Math.min(right, left + (row.ends[index] - from) * scale);
      context.fillStyle = this.paint[row.names[index]];
      context.fillRect(start, y, Math.max(0.7, end - start - (end - start > 4 ? 0.7 : 0)), height);
      const name = this.trace.names[row.names[index]];
      if (labels && height > 16 && end - start > 46 && !isIdle(name)) {
        const text = words(name);
        if (context.measureText(text).width < end - start - 10) {
          context.fillStyle = "#ffffff";
          context.fillText(text, start + 5, y + height / 2 + 0.5);
        }
      }
    }
  }

  // What fills the time of each column of pixels: [column * names + name] -> share.
  segmentColumns(row, first, last, columns, from, scale) {
    const kinds = this.trace.names.length;
    const filled = new Float32Array(columns * kinds);
    for (let index = first; index < last; index += 1) {
      const start = Math.max(0, (row.starts[index] - from) * scale);
      const end = Math.min(columns, (row.ends[index] - from) * scale);
      for (let column = Math.floor(start); column < end; column += 1) {
        filled[column * kinds + row.names[index]] += Math.min(end, column + 1) - Math.max(start, column);
      }
    }
    return filled;
  }

  profileColumns(row, [from, to], columns) {
    const kinds = this.trace.names.length;
    const filled = new Float32Array(columns * kinds);
    const cells = row.profile.length / kinds;
    const perColumn = ((to - from) / this.trace.duration) * (cells / columns); // cells in one column
    for (let column = 0; column < columns; column += 1) {
      const start = (from / this.trace.duration) * cells + column * perColumn;
      for (let cell = Math.floor(start); cell < Math.min(cells, start + perColumn); cell += 1) {
        const weight = (Math.min(cell + 1, start + perColumn) - Math.max(cell, start)) / perColumn / 1000;
        for (let kind = 0; kind < kinds; kind += 1) filled[column * kinds + kind] += weight * row.profile[cell * kinds + kind];
      }
    }
    return filled;
  }

  // Each column a stack of what filled its time, idle on top.
  drawStacks(context, filled, y, height, left) {
    const kinds = this.trace.names.length;
    for (let column = 0; column < filled.length / kinds; column += 1) {
      let bottom = y + height;
      for (const kind of this.order) {
        const part = filled[column * kinds + kind] * height;
        if (part <= 0.01) continue;
        context.fillStyle = this.paint[kind];
        context.fillRect(left + column, bottom - part, 1.02, part + 0.3);
        bottom -= part;
      }
    }
  }

  drawLabels(context, row, y, left, right) {
    const middle = y + this.rowHeight / 2;
    context.fillStyle = this.ink;
    context.fillText(row.label, 0, middle, left - 8);
    if (!row.canIdle) return;
    context.fillStyle = this.soft;
    context.fillText(`idle ${format.percent(this.idleShare(row))}`, right + 9, middle);
  }

  // Idle share of the visible part of a row, of the time that was traced.
  idleShare(row) {
    const [from, to] = this.range;
    let [idle, all] = [0, 0];
    const count = (length, name) => {
      all += length;
      if (isIdle(this.trace.names[name])) idle += length;
    };
    if (this.isDetailed(this.range)) {
      for (let index = firstEndingAfter(row, from); index < row.starts.length && row.starts[index] < to; index += 1) {
        count(Math.min(row.ends[index], to) - Math.max(row.starts[index], from), row.names[index]);
      }
    } else {
      this.profileColumns(row, this.range, 200).forEach((share, index) => count(share, index % this.trace.names.length));
    }
    return all > 0 ? Number((idle / all).toFixed(3)) : null;
  }

  drawInstants(context, left, right, step) {
    const [from, to] = this.range;
    const visible = this.trace.instants.filter(([time]) => time >= from && time <= to);
    if (visible.length > 40) return;
    context.strokeStyle = colour("--publish");
    context.setLineDash([2, 3]);
    for (const [time] of visible) {
      const x = Math.round(left + ((time - from) / (to - from)) * (right - left)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.rows.length * step);
      context.stroke();
    }
    context.setLineDash([]);
  }

  drawTimes(context, left, right, height) {
    const [from, to] = this.range.map((time) => time / 1e6);
    const unit = to > 7200 ? 3600 : to > 300 && to - from > 60 ? 60 : 1;
    const name = unit === 3600 ? " h" : unit === 60 ? " min" : " s";
    context.fillStyle = this.soft;
    context.textAlign = "center";
    for (const tick of ticks(from / unit, to / unit, Math.max(2, (right - left) / 110))) {
      const x = left + ((tick * unit - from) / (to - from)) * (right - left);
      context.fillRect(x, height - 21, 1, 4);
      context.fillText(trim(tick.toFixed(6)) + name, x, height - 9);
    }
    context.textAlign = "left";
  }

  drawOverview(width, left, right) {
    const height = this.rows.length * (this.overviewRow + 1) + 4;
    const context = this.prepare(this.overview, width, height);
    this.rows.forEach((row, index) => {
      this.drawRow(context, row, 2 + index * (this.overviewRow + 1), this.overviewRow, left, right, [0, this.trace.duration], false);
    });
    context.fillStyle = this.soft;
    context.fillText("whole run", 0, height / 2);
    const [start, end] = this.range.map((time) => left + (time / this.trace.duration) * (right - left));
    context.strokeStyle = this.ink;
    context.lineWidth = 1.5;
    context.strokeRect(start - 1, 0.75, Math.max(3, end - start + 2), height - 1.5);
  }

  explain(event, share) {
    const row = this.rows[Math.floor((event.offsetY - 2) / (this.rowHeight + this.rowGap))];
    if (!row || share < 0 || share > 1) return hideTooltip();
    const [from, to] = this.range;
    const time = from + share * (to - from);
    const near = this.trace.instants.filter(([at]) => Math.abs(at - time) < ((to - from) / this.main.clientWidth) * 4).slice(0, 3)
      .map(([, name]) => element("div", { class: "faint" }, name));
    if (!this.isDetailed(this.range)) {
      const width = (to - from) / 200;
      const shares = [...this.profileColumns(row, [time - width / 2, time + width / 2], 1)].map((value, kind) => [kind, value]);
      return showTooltip(event, element("b", {}, `${row.label}, around ${format.seconds(time / 1e6)}`), tooltipTable(shares
        .filter(([, value]) => value > 5e-4).sort((a, b) => b[1] - a[1])
        .map(([kind, value]) => [spanVariable(this.trace.names[kind]), words(this.trace.names[kind]), format.percent(value)])));
    }
    const index = firstEndingAfter(row, time);
    const found = index < row.starts.length && row.starts[index] <= time;
    if (!found) return showTooltip(event, element("b", {}, row.label), element("div", {}, `not traced, at ${format.seconds(time / 1e6)}`), ...near);
    const name = this.trace.names[row.names[index]];
    const detail = this.trace.details[row.details[index]];
    return showTooltip(event, element("b", {}, `${row.label}: ${words(name)}`),
      tooltipTable([[null, "takes", format.seconds((row.ends[index] - row.starts[index]) / 1e6)], [null, "begins at", format.seconds(row.starts[index] / 1e6)]]),
      detail ? element("div", { class: "faint" }, detail) : null, ...near);
  }
}
