// The two charts, in SVG at the width that they have, so that lines stay crisp.

const NAMESPACE = "http://www.w3.org/2000/svg";
const MOST_ROUNDS = 60; // the last ones are shown
const MARGIN = { left: 50, right: 8, top: 10, bottom: 38 };

/** Bars of accepted drafts with the target's own token on top, and the mean as a line. */
export function drawRounds(svg, run) {
  const rounds = run ? run.rounds : [];
  const shown = rounds.slice(-MOST_ROUNDS);
  const first = rounds.length - shown.length + 1;
  const most = Math.max(3, ...shown.map((round) => round.num_drafted)) + 1;
  const plot = new Plot(svg, most, "round", "tokens");
  for (let value = 0; value <= most; value += Math.ceil(most / 6)) plot.tickY(value, `${value}`);
  if (!shown.length) return plot.note("no rounds yet");
  const step = plot.width / Math.max(shown.length, 12);
  shown.forEach((round, i) => {
    const own = { 0: "target" }[round.num_drafted] ?? (round.num_accepted < round.num_drafted ? "recovered" : "bonus");
    plot.bar(i * step, step, 0, round.num_accepted, "accepted");
    plot.bar(i * step, step, round.num_accepted, round.num_accepted + 1, own);
  });
  plot.tickX(step / 2, `${first}`);
  if (shown.length > 1) plot.tickX((shown.length - 0.5) * step, `${rounds.length}`);
  plot.line(run.meanLength);
  svg.setAttribute("aria-label", `Tokens a round: ${rounds.length} rounds, ${run.meanLength.toFixed(2)} in the mean`);
}

/** For each position of a draft, the share of rounds that accepted it. */
export function drawPositions(svg, run) {
  const rates = run ? run.ratesByPosition : [];
  const plot = new Plot(svg, 1, "position of the draft", "share of rounds");
  for (const share of [0, 0.5, 1]) plot.tickY(share, percent(share));
  if (!rates.length) return plot.note("nothing drafted yet");
  const step = plot.width / rates.length;
  const width = Math.min(step * 0.6, 56);
  rates.forEach((rate, i) => {
    const center = (i + 0.5) * step;
    plot.bar(center - width / 2, width, 0, rate, "accepted");
    plot.label(center, rate, percent(rate));
    plot.tickX(center, `${i + 1}`);
  });
  svg.setAttribute("aria-label", `Acceptance by position: ${rates.map(percent).join(", ")}`);
}

export function percent(share) {
  return `${Math.round(100 * share)}%`;
}

class Plot {
  constructor(svg, most, xName, yName) {
    const total = svg.clientWidth || 300;
    const height = Number(svg.getAttribute("height"));
    svg.setAttribute("viewBox", `0 0 ${total} ${height}`);
    svg.replaceChildren();
    this.svg = svg;
    this.most = most;
    this.width = total - MARGIN.left - MARGIN.right;
    this.height = height - MARGIN.top - MARGIN.bottom;
    this.text(MARGIN.left + this.width / 2, height - 4, xName, "axis middle");
    const name = this.text(0, 0, yName, "axis middle");
    name.setAttribute("transform", `translate(11 ${MARGIN.top + this.height / 2}) rotate(-90)`);
  }

  y(value) {
    return MARGIN.top + this.height * (1 - value / this.most);
  }

  tickY(value, label) {
    const y = Math.round(this.y(value)) + 0.5; // on whole pixels
    this.add("line", { x1: MARGIN.left, x2: MARGIN.left + this.width, y1: y, y2: y, class: "grid" });
    this.text(MARGIN.left - 6, y + 4, label, "tick end");
  }

  tickX(x, label) {
    this.text(MARGIN.left + x, MARGIN.top + this.height + 16, label, "tick middle");
  }

  bar(x, width, low, high, name) {
    if (high <= low) return;
    const gap = width > 4 ? 1 : 0;
    const [top, bottom] = [this.y(high), this.y(low)];
    this.add("rect", { x: MARGIN.left + x, width: width - gap, y: top, height: bottom - top, class: `bar-${name}` });
  }

  line(value) {
    const y = this.y(value);
    this.add("line", { x1: MARGIN.left, x2: MARGIN.left + this.width, y1: y, y2: y, class: "mean" });
  }

  label(x, value, text) {
    const inside = value > 0.85;
    this.text(MARGIN.left + x, this.y(value) + (inside ? 14 : -4), text, inside ? "inside middle" : "value middle");
  }

  note(text) {
    this.text(MARGIN.left + this.width / 2, MARGIN.top + this.height / 2, text, "axis middle");
  }

  text(x, y, content, name) {
    const element = this.add("text", { x, y, class: name });
    element.textContent = content;
    return element;
  }

  add(tag, attributes) {
    const element = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return this.svg.appendChild(element);
  }
}
