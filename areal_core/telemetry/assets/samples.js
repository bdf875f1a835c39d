// Shares of time as stacked bars, and sample trajectories, an early and a late one side by side.

function startShares() {
  const parent = document.getElementById("shares");
  for (const { title, seconds } of DATA.shares) {
    const rank = ([name]) => (KNOWN_SPANS.indexOf(name) + 1 || KNOWN_SPANS.length - 2.5) + (name === "not traced" ? 99 : 0);
    const total = Object.values(seconds).reduce((sum, value) => sum + value, 0);
    const parts = Object.entries(seconds).filter(([, value]) => value >= 5e-4 * total).sort((a, b) => rank(a) - rank(b));
    const bar = element("div", { class: "share-bar" }, ...parts.map(([name, value]) => {
      const share = value / total;
      const piece = element("span", { class: isIdle(name) ? "quiet" : null, style: `flex:${value} 0 0;background:var(${spanVariable(name)})` });
      piece.addEventListener("pointermove", (event) => showTooltip(event, element("b", {}, `${title}: ${words(name)}`),
        tooltipTable([[null, "time", format.seconds(value)], [null, "share", format.percent(share)]])));
      piece.addEventListener("pointerleave", hideTooltip);
      return piece;
    }));
    onResize(bar, () => parts.forEach(([name, value], index) => { // a name where there is room for it
      const room = (bar.clientWidth * value) / total;
      bar.children[index].textContent = room > 8 * words(name).length + 12 ? words(name) : "";
    }));
    const keys = element("div", { class: "share-keys" }, ...parts.map(([name, value]) => element("span", {},
      swatch(spanVariable(name), true), `${words(name)} ${format.percent(Number((value / total).toFixed(3)))}`)));
    parent.append(element("div", { class: "share" }, element("span", {}, title), bar, keys));
  }
}

const shownSamples = { colours: "version", columns: [] };

function startSamples() {
  const parent = document.getElementById("samples");
  if (!DATA.samples.length) {
    parent.append(element("p", { class: "empty" }, "No trajectories were recorded."));
    return;
  }
  const choice = element("span", { class: "toggle", role: "group", "aria-label": "Colour of the tokens" },
    element("button", { type: "button", "data-value": "version", "aria-pressed": "true" }, "version age"),
    element("button", { type: "button", "data-value": "probability", "aria-pressed": "false" }, "probability"));
  const keys = element("span", { class: "age-keys" });
  const drawAll = () => {
    keys.replaceChildren(...colourKeys());
    for (const column of shownSamples.columns) column.draw();
  };
  toggle(choice, (value) => {
    shownSamples.colours = value;
    drawAll();
  });
  const columns = element("div", { class: "sample-columns" });
  parent.append(element("div", { class: "sample-bar" }, element("span", {}, "tokens coloured by ", choice), keys), columns);
  const [early, late] = firstPair();
  shownSamples.columns.push(new SampleColumn(columns, "early", early));
  if (DATA.samples.length > 1) shownSamples.columns.push(new SampleColumn(columns, "late", late));
  parent.append(element("p", { class: "caption" }, "Tokens as sampled, each with the version of the weights that produced it: a sequence that was in flight",
    " when new weights arrived goes on under them. The age counts from the version that trained on the token. Point at a token for its logprob."));
  drawAll();
}

// A sample near the beginning and one near the end: of the same prompt if there are such, or else the first one, and
// the last one that an update of the weights met in flight.
function firstPair() {
  const last = DATA.samples.length - 1;
  const near = Math.ceil(DATA.samples.length / 4);
  for (let early = 0; early < near; early += 1) {
    for (let late = last; late > last - near && late > early; late -= 1) {
      if (DATA.samples[early].prompt === DATA.samples[late].prompt) return [early, late];
    }
  }
  const mixed = DATA.samples.findLastIndex((sample) => new Set(sample.versions).size > 1);
  return [0, mixed > last - near && mixed > 0 ? mixed : last];
}

function colourKeys() {
  if (shownSamples.colours === "probability") {
    return [[0.05, "unlikely"], [0.5, "even"], [0.95, "certain"]].map(([probability, text]) => element("span", {},
      element("span", { class: "swatch block", style: `background:${probabilityColour(probability)}` }), text));
  }
  const oldest = Math.max(...DATA.samples.flatMap((sample) => sample.versions.map((version) => sample.version - version)), 0);
  return Array.from({ length: Math.min(oldest, AGE_COLOURS - 1) + 1 }, (_, age) => element("span", {}, swatch(ageVariable(age), true),
    age === 0 ? "age 0" : age === AGE_COLOURS - 1 && oldest > age ? `${age} and more` : String(age)));
}

function probabilityColour(probability) {
  return `color-mix(in oklab, var(--a0) ${Math.round(100 * probability)}%, var(--a5))`;
}

class SampleColumn {
  constructor(parent, title, index) {
    this.slider = element("input", { type: "range", min: 0, max: DATA.samples.length - 1, step: 1, "aria-label": `${title} sample` });
    this.slider.value = index;
    this.step = element("span");
    this.facts = element("div", { class: "sample-facts" });
    this.text = element("div", { class: "sample-text" });
    parent.append(element("article", {}, element("div", { class: "sample-pick" }, element("h3", {}, title), this.slider, this.step), this.facts, this.text));
    this.slider.addEventListener("input", () => this.draw());
    this.text.addEventListener("pointermove", (event) => this.explain(event));
    this.text.addEventListener("pointerleave", hideTooltip);
  }

  draw() {
    const sample = this.sample = DATA.samples[this.slider.value];
    const fact = (name, value) => (value === null ? null : element("span", {}, `${name} `, element("b", {}, value)));
    const versions = [...new Set(sample.versions)].sort((a, b) => a - b).map((version) => `v${version}`);
    const shown = versions.length > 4 ? `${versions[0]} … ${versions.at(-1)}` : versions.join(", ");
    this.step.textContent = sample.step === null ? "" : `step ${sample.step}`;
    this.facts.replaceChildren(...[fact("reward", sample.reward === null ? null : format.compact(sample.reward)),
      fact("advantage", sample.advantage === null ? null : format.compact(sample.advantage)),
      fact("tokens", String(sample.length)), fact("versions", shown || null), fact("trained at", `v${sample.version}`),
      fact("finish", sample.finish || null)].filter((part) => part !== null));
    this.text.replaceChildren(element("span", { class: "prompt" }, sample.prompt), ...sample.tokens.flatMap((token, index) => this.token(token, index)));
    if (sample.length > sample.tokens.length) this.text.append(element("span", { class: "prompt" }, ` … ${sample.length - sample.tokens.length} more tokens`));
  }

  token(token, index) {
    const sample = this.sample;
    const logprob = sample.logprobs[index] ?? null;
    const paint = shownSamples.colours === "version" ? `var(${ageVariable(Math.max(0, sample.version - (sample.versions[index] ?? sample.version)))})`
      : logprob === null ? "var(--idle)" : probabilityColour(Math.exp(logprob));
    const text = token === "" ? "∅" : token.replaceAll("\n", "⏎");
    const special = /^<[^\s>]+>$/.test(token) ? " special" : "";
    const node = element("span", { class: `token${special}`, style: `--token:${paint}`, "data-index": index }, text);
    return token.endsWith("\n") ? [node, "\n"] : [node];
  }

  explain(event) {
    const node = event.target.closest(".token");
    if (!node) return hideTooltip();
    const sample = this.sample;
    const index = Number(node.dataset.index);
    const version = sample.versions[index];
    const logprob = sample.logprobs[index] ?? null;
    const rows = version === undefined ? [] : [[null, "version", `v${version}`], [null, "age when trained on", String(sample.version - version)]];
    if (logprob !== null) rows.push([null, "logprob", logprob.toFixed(3).replace("-", "−")], [null, "probability", format.percent(Math.exp(logprob))]);
    return showTooltip(event, element("b", {}, JSON.stringify(sample.tokens[index])), tooltipTable(rows));
  }
}
