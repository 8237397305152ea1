// One answer on the page. All text of a model enters by textContent.

const NAMES = { length: "reached max tokens", stop: "ended by itself", null: "stopped" };

export class Pane {
  constructor(title) {
    this.element = make("section", "pane");
    this.element.setAttribute("aria-label", title);
    const head = this.element.appendChild(make("header"));
    head.appendChild(make("h3", "", title));
    this.speed = head.appendChild(make("p", "speed"));
    this.text = this.element.appendChild(make("div", "text"));
    this.figures = this.element.appendChild(make("ul", "figures"));
    this.note("waits");
  }

  begin() {
    this.note("");
    this.text.setAttribute("aria-busy", "true");
  }

  note(text) {
    this.speed.textContent = text;
  }

  /** Write the rounds that a run got with its last chunk. */
  add(run, rounds) {
    this.text.append(...rounds.map(roundElement));
    if (run.speed !== null) this.speed.textContent = speedText(run.speed);
  }

  /** Show how the run ended. */
  finish(run) {
    this.text.setAttribute("aria-busy", "false");
    if (!this.text.textContent) this.text.append(make("span", "none", "(no text)"));
    this.figures.replaceChildren(...figures(run).map((text) => make("li", "", text)));
  }

  fail(message) {
    this.text.setAttribute("aria-busy", "false");
    const element = this.element.appendChild(make("p", "error", message));
    element.setAttribute("role", "alert");
  }
}

export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}

function roundElement(round) {
  const element = make("span", "round");
  if (round.num_drafted) {
    element.title = `${round.num_accepted} of ${round.num_drafted} drafts accepted`;
  }
  for (const span of round.spans) {
    if (span.text === "") continue;
    // a rejected line break must not break the line
    const text = span.kind === "rejected" ? span.text.replaceAll("\n", "\u21b5") : span.text;
    element.append(make("span", span.kind, text));
  }
  return element;
}

function figures(run) {
  const found = [`${run.tokenIds.length} tokens`];
  if (run.speculates && run.numDrafted) {
    found.push(`${run.meanLength.toFixed(2)} tokens a round`);
    found.push(`${run.numAccepted} of ${run.numDrafted} drafts accepted`);
  } else if (run.speculates && run.rounds.length) {
    found.push("nothing was drafted");
  }
  if (run.speed !== null) found.push(speedText(run.speed));
  if (run.firstTokenMs !== null) found.push(`first token after ${run.firstTokenMs.toFixed(0)} ms`);
  found.push(NAMES[run.finishReason] ?? run.finishReason, `seed ${run.seed}`);
  return found;
}

function speedText(speed) {
  return `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
}
