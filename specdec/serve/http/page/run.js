// One answer as it grows: its text, tokens and rounds, and the figures that follow from them.

export class Run {
  constructor(speculates, seed) {
    this.speculates = speculates;
    this.seed = seed;
    this.text = "";
    this.tokenIds = [];
    this.rounds = []; // as the server sends them, without the prompt's own pass
    this.finishReason = null;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.numFirst = 0; // tokens of the first delivery
  }

  /** Take a choice of a chunk; returns its rounds, the prompt's own pass included. */
  add(choice) {
    this.text += choice.text ?? choice.delta.content ?? "";
    const rounds = choice.rounds ?? []; // a delivery in several chunks has them in the first
    for (const round of rounds) {
      if (round.num_drafted !== null) this.rounds.push(round);
      for (const span of round.spans) {
        if (span.kind !== "rejected") this.tokenIds.push(...span.token_ids);
      }
    }
    this.finishReason = choice.finish_reason;
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = this.tokenIds.length;
    }
    return rounds;
  }

  /** Tokens a second after the first delivery; null before a second one. */
  get speed() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.tokenIds.length - this.numFirst) / seconds : null;
  }

  get firstTokenMs() {
    return this.firstAt === null ? null : this.firstAt - this.startedAt;
  }

  get numDrafted() {
    return sum(this.rounds.map((round) => round.num_drafted));
  }

  get numAccepted() {
    return sum(this.rounds.map((round) => round.num_accepted));
  }

  /** 1 + accepted drafts a round; null without rounds. */
  get meanLength() {
    return this.rounds.length ? 1 + this.numAccepted / this.rounds.length : null;
  }

  /** For positions 1..K, the share of rounds that accepted at least that many drafts. */
  get ratesByPosition() {
    const most = Math.max(0, ...this.rounds.map((round) => round.num_drafted));
    return Array.from({ length: most }, (_, i) => {
      return this.rounds.filter((round) => round.num_accepted > i).length / this.rounds.length;
    });
  }
}

/** What two runs with one seed show: whether they agree, and how the speeds compare.
 *  kind: same, differ, or slower, which is no success although the texts agree. */
export function verdict(drafted, plain) {
  const [left, right] = [drafted.tokenIds, plain.tokenIds];
  const both = Math.min(left.length, right.length);
  const first = left.slice(0, both).findIndex((token, i) => token !== right[i]);
  const areWhole = drafted.finishReason !== null && plain.finishReason !== null;
  if (first >= 0 || (areWhole && (left.length !== right.length || drafted.text !== plain.text))) {
    const place = first >= 0 ? first + 1 : both + 1;
    const cause = "with --acceptance rejection or block they may";
    return { kind: "differ", text: `The texts differ from token ${place} on; ${cause}.` };
  }
  if (!areWhole) return { kind: "same", text: `Stopped. The texts agree as far as both go: ${both} tokens.` };
  const same = `The same text, token for token (${both}).`;
  if (!plain.speed || !drafted.speed) return { kind: "same", text: same };
  const ratio = (drafted.speed / plain.speed).toFixed(2);
  if (ratio < 1) return { kind: "slower", text: `${same} With speculation it was slower: ${ratio} times the speed.` };
  return { kind: "same", text: `${same} With speculation: ${ratio} times the speed.` };
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}
