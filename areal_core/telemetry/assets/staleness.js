// How old tokens were when they were trained on: a histogram over the run, and its course over the steps.

function startStaleness() {
  const { counts, steps } = DATA.staleness;
  const parent = document.querySelector("#staleness > .panels");
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (steps.length > 1) parent.prepend(ageCourse());
  if (total > 0) parent.prepend(ageHistogram(total));
  const note = document.getElementById("staleness-note");
  const bound = DATA.staleness.unbounded ? "The age is not bounded." : DATA.staleness.eta === null ? "" : `The bound η is ${DATA.staleness.eta}.`;
  const withheld = DATA.staleness.withheld ? ` ${format.compact(DATA.staleness.withheld)} tokens were withheld from the loss.` : "";
  note.textContent = bound + withheld;
}

function agePanel(title, draw) {
  const picture = svg("svg", { role: "img", "aria-label": title });
  const figure = element("figure", { class: "panel" }, element("figcaption", {}, element("span", {}, title)), picture);
  onResize(picture, () => draw(picture, picture.clientWidth, picture.clientHeight));
  return figure;
}

function ageHistogram(total) {
  const { counts, eta } = DATA.staleness;
  const bars = Math.max(counts.length, eta === null ? 0 : Math.min(eta + 1, 2 * counts.length + 3), 3);
  const highest = Math.max(...counts) / total;
  return agePanel("Token age at consumption, versions", (picture, width, height) => {
    const [left, right, top, bottom] = [46, width - 8, 26, height - 22];
    const slot = (right - left) / bars;
    const y = (share) => bottom - (share / (highest * 1.05)) * (bottom - top);
    const parts = ticks(0, highest * 1.05, 4).flatMap((level) => [
      svg("line", { class: "grid", x1: left, x2: right, y1: y(level), y2: y(level) }),
      svg("text", { x: left - 6, y: y(level) + 3.5, "text-anchor": "end" }, format.percent(level)),
    ]);
    const every = Math.ceil(18 / slot);
    for (let age = 0; age < bars; age += 1) {
      const share = (counts[age] ?? 0) / total;
      const x = left + slot * age;
      const bar = svg("rect", { x: x + slot * 0.12, width: slot * 0.76, y: y(share), height: Math.max(0, bottom - y(share)),
        style: `fill:var(${ageVariable(age)})` });
      const area = svg("rect", { x, width: slot, y: top, height: bottom - top, fill: "transparent" });
      area.addEventListener("pointermove", (event) => showTooltip(event, element("b", {}, `age ${age}`),
        tooltipTable([[null, "tokens", format.compact(counts[age] ?? 0)], [null, "share", format.percent(share)]])));
      area.addEventListener("pointerleave", hideTooltip);
      parts.push(bar, area);
      if (age % every === 0) parts.push(svg("text", { x: x + slot / 2, y: bottom + 15, "text-anchor": "middle" }, String(age)));
      if (slot > 34 && share > 0) {
        parts.push(svg("text", { x: x + slot / 2, y: y(share) - 4, "text-anchor": "middle" }, format.percent(Number(share.toPrecision(2)))));
      }
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    if (eta !== null && eta + 1 <= bars) {
      const x = left + slot * (eta + 1);
      const before = x > (left + right) / 2; // the side of the line that has room for the text
      parts.push(svg("line", { class: "eta", x1: x, x2: x, y1: 2, y2: bottom }),
        svg("text", { x: before ? x - 5 : x + 5, y: 10, "text-anchor": before ? "end" : "start", style: "fill:var(--mark)" }, `bound η = ${eta}`));
    }
    picture.replaceChildren(...parts);
  });
}

function ageCourse() {
  const { steps, shares } = DATA.staleness;
  const ages = shares[0].length;
  return agePanel("Ages over the run, share of tokens", (picture, width, height) => {
    const [left, right, top, bottom] = [46, width - 8, 8, height - 22];
    const first = steps[0] <= 1 || steps[0] < 0.05 * steps.at(-1) ? 0 : steps[0];
    const x = (step) => left + ((step - first) / (steps.at(-1) - first)) * (right - left);
    const y = (share) => bottom - share * (bottom - top);
    const below = shares.map(() => 0);
    const parts = [];
    for (let age = 0; age < ages; age += 1) {
      const lower = below.map((share, index) => `${x(steps[index]).toFixed(1)} ${y(share).toFixed(1)}`);
      shares.forEach((row, index) => { below[index] += row[age]; });
      const upper = below.map((share, index) => `${x(steps[index]).toFixed(1)} ${y(share).toFixed(1)}`);
      parts.push(svg("path", { d: `M${lower.join("L")}L${upper.reverse().join("L")}Z`, style: `fill:var(${ageVariable(age)})` }));
    }
    for (const level of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(svg("text", { x: left - 6, y: y(level) + 3.5, "text-anchor": "end" }, format.percent(level)));
    }
    for (const tick of ticks(first, steps.at(-1), Math.max(2, (right - left) / 64))) {
      parts.push(svg("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle" }, format.compact(tick)));
    }
    parts.push(svg("text", { class: "unit", x: left - 14, y: bottom + 15, "text-anchor": "end" }, "step"));
    const area = svg("rect", { x: left, y: top, width: right - left, height: bottom - top, fill: "transparent" });
    area.addEventListener("pointermove", (event) => {
      const share = (event.clientX - picture.getBoundingClientRect().left - left) / (right - left);
      const wanted = first + share * (steps.at(-1) - first);
      let nearest = 0;
      steps.forEach((step, index) => { if (Math.abs(step - wanted) < Math.abs(steps[nearest] - wanted)) nearest = index; });
      showTooltip(event, element("b", {}, `step ${Math.round(steps[nearest])}`), tooltipTable(shares[nearest]
        .map((value, age) => [ageVariable(age), `age ${age}`, format.percent(value)]).filter((row, age) => shares[nearest][age] > 0)));
    });
    area.addEventListener("pointerleave", hideTooltip);
    picture.replaceChildren(...parts, area);
  });
}
