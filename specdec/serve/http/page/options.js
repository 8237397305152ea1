// The options as the fields of a request; what is left empty is the server's to choose.

const NUMBERS = [
  "temperature",
  "max_tokens",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
];
const MOST_SEEDS = 2 ** 32;

export function choice(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

/** The fields that both modes share. Throws an Error that names an input that is no number. */
export function readOptions() {
  const fields = {};
  for (const name of NUMBERS) {
    const value = readNumber(name);
    if (value !== null) fields[name] = value;
  }
  // drawn here, so that two runs have the same one and the page can show it
  fields.seed = readNumber("seed") ?? Math.floor(Math.random() * MOST_SEEDS);
  const stop = document.getElementById("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop.map(unescaped);
  return fields;
}

/** What says whether a request drafts, and how much. */
export function speculation(speculates) {
  const count = readNumber("num_speculative_tokens");
  if (!speculates) return { speculate: false };
  return count === null ? { speculate: true } : { speculate: true, num_speculative_tokens: count };
}

function readNumber(id) {
  const input = document.getElementById(id);
  if (input.validity.badInput) {
    const name = input.labels[0].firstChild.textContent.trim();
    input.focus();
    throw new Error(`${name} is not a number: give one, or leave it empty.`);
  }
  return input.value === "" ? null : Number(input.value);
}

function unescaped(line) {
  const marks = { n: "\n", t: "\t", "\\": "\\" };
  return line.replace(/\\([nt\\])/g, (_, mark) => marks[mark]);
}
