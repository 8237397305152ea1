// The page: one request at a time, with speculation, without, or both, one after the other.

import { drawPositions, drawRounds, percent } from "/page/chart.js";
import { models, ServerError, stream, useKey } from "/page/client.js";
import { choice, readOptions, speculation } from "/page/options.js";
import { make, Pane } from "/page/pane.js";
import { Run, verdict } from "/page/run.js";
import { setUpTheme } from "/page/theme.js";

const at = (id) => document.getElementById(id);
const TITLES = { true: "With speculation", false: "Without speculation" };
const HINTS = {
  on: "The draft proposes, the target decides.",
  off: "The target writes token by token.",
  both: "First with speculation, then without, with the same seed.",
};

let model = null;
let messages = []; // of the chat so far
let controller = null; // of the running request
let charted = null; // the run that the charts show
let isModeChosen = false; // by the reader

async function ask(prompt) {
  const isChat = choice("mode") === "chat";
  const runs = [];
  let turn = null;
  let problem = null;
  try {
    const fields = { model, show_drafts: true, ...readOptions() };
    const how = choice("speculation");
    const kinds = how === "both" ? [true, false] : [how === "on"];
    const bodies = kinds.map((speculates) => ({ ...fields, ...speculation(speculates) }));
    turn = startTurn(prompt, isChat, kinds);
    controller = new AbortController();
    setRunning(true);
    for (const [i, body] of bodies.entries()) {
      runs.push(new Run(kinds[i], fields.seed));
      charted = runs[0];
      await write(turn.panes[i], runs[i], prompt, isChat, body, controller.signal);
    }
    say(`Finished: ${runs[0].tokenIds.length} tokens`);
  } catch (error) {
    problem = error.name === "AbortError" ? null : error;
    say("Stopped");
  }
  controller = null;
  setRunning(false);
  turn?.panes.slice(runs.length).forEach((pane) => pane.note("not run"));
  if (problem) return explain(problem, turn, runs, prompt);
  if (runs.length === 2) showVerdict(turn, verdict(...runs));
  if (isChat && runs[0].text) remember(prompt, runs[0].text);
}

async function write(pane, run, prompt, isChat, body, signal) {
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  const given = isChat ? { messages: conversation(prompt) } : { prompt };
  let stop = null;
  pane.begin();
  try {
    for await (const chunk of stream(path, { ...given, ...body }, signal)) {
      keepInView(() => pane.add(run, run.add(chunk.choices[0])));
      drawSoon();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    stop = error;
  }
  keepInView(() => pane.finish(run));
  if (stop) throw stop;
}

function conversation(prompt) {
  const system = at("system").value.trim();
  const start = system ? [{ role: "system", content: system }] : [];
  return [...start, ...messages, { role: "user", content: prompt }];
}

function remember(prompt, text) {
  messages = [...messages, { role: "user", content: prompt }, { role: "assistant", content: text }];
}

function startTurn(prompt, isChat, kinds) {
  at("empty").hidden = true;
  const element = make("article", "turn");
  const given = element.appendChild(make("div", "given"));
  given.append(make("h3", "", isChat ? "You" : "Prompt"), make("div", "text", prompt));
  const panes = kinds.map((speculates) => new Pane(TITLES[speculates]));
  const row = element.appendChild(make("div", "panes"));
  row.append(...panes.map((pane) => pane.element));
  at("answers").append(element);
  element.scrollIntoView({ block: "end" });
  return { element, panes };
}

function showVerdict(turn, { kind, text }) {
  const element = make("p", `verdict ${kind}`, text);
  keepInView(() => turn.element.append(element));
  say(text);
}

/** Show an error where the reader looks: in the answer, or under the prompt if there is none. */
function explain(error, turn, runs, prompt) {
  if (error instanceof ServerError && error.status === 401) askForKey(error.message);
  if (turn === null) {
    at("problem").textContent = error.message;
    at("problem").hidden = false;
  } else {
    keepInView(() => turn.panes[runs.length - 1].fail(error.message));
  }
  if (!at("prompt").value) at("prompt").value = prompt;
}

function say(text) {
  at("status").textContent = text;
}

function setRunning(isRunning) {
  at("send").disabled = isRunning;
  at("stop-button").disabled = !isRunning;
  at("clear").disabled = isRunning;
}

/** Follow the text unless the reader has scrolled up. */
function keepInView(change) {
  const turn = at("answers").lastElementChild;
  const isAtEnd = turn.getBoundingClientRect().bottom < at("composer").getBoundingClientRect().top + 40;
  change();
  if (isAtEnd) turn.scrollIntoView({ block: "end" });
}

let isDue = false;

function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  drawRounds(at("rounds-chart"), charted);
  drawPositions(at("positions-chart"), charted);
  const hasRounds = charted !== null && charted.rounds.length > 0;
  at("mean").textContent = hasRounds ? `mean ${charted.meanLength.toFixed(2)}` : "";
  const drafted = hasRounds ? charted.numDrafted : 0;
  at("rate").textContent = drafted ? `${percent(charted.numAccepted / drafted)} overall` : "";
}

async function connect() {
  try {
    const [first] = await models();
    model = first.id;
    const context = `${first.max_model_len.toLocaleString("en")} tokens of context`;
    const facts = ` \u00b7 ${context} \u00b7 ${draftText(first.speculation)}`;
    at("model").replaceChildren(model, make("span", "", facts));
    openFor(first);
    return null;
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) return "key";
    at("model").textContent = error.message;
    return error.message;
  }
}

function draftText(speculation) {
  return speculation ? `draft ${speculation.draft}, K ${countText(speculation, "= ")}` : "no draft";
}

function countText({ num_speculative_tokens: count, is_adaptive: isAdaptive }, start = "") {
  return isAdaptive ? `up to ${count}` : `${start}${count}`;
}

/** A model that was not trained to chat would answer with noise: let it continue texts instead. */
function openFor({ is_chat_model: isChatModel, speculation }) {
  const mode = isChatModel ? "chat" : "completion";
  if (!isModeChosen) document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
  if (speculation) at("num_speculative_tokens").placeholder = countText(speculation);
  setMode();
}

function askForKey(message) {
  at("key-error").textContent = message ?? "";
  at("key-error").hidden = !message;
  if (!at("key-dialog").open) at("key-dialog").showModal();
}

async function submitKey(event) {
  event.preventDefault();
  useKey(at("key").value);
  const problem = await connect();
  if (problem === "key") return askForKey("The server does not take this key.");
  at("key").value = "";
  at("key-dialog").close();
  at("prompt").focus();
}

function change(event) {
  if (event.target.name === "mode") isModeChosen = true;
  setMode();
}

function setMode() {
  const isChat = choice("mode") === "chat";
  at("system-field").hidden = !isChat;
  at("keys").textContent = isChat
    ? "Enter sends, Shift+Enter breaks the line, Esc stops."
    : "Ctrl+Enter sends, Esc stops.";
  at("prompt").placeholder = isChat ? "Write a message" : "Write the beginning of a text";
  at("speculation-hint").textContent = HINTS[choice("speculation")];
}

function submit(event) {
  event.preventDefault();
  const prompt = at("prompt").value;
  if (!prompt || controller !== null) return;
  at("problem").hidden = true;
  if (choice("mode") === "chat") at("prompt").value = "";
  ask(prompt);
}

function clear() {
  messages = [];
  charted = null;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("empty").hidden = false;
  at("clear").disabled = true;
  draw();
  at("prompt").focus();
}

function onKey(event) {
  if (event.key === "Escape" && controller !== null) controller.abort();
  if (event.key !== "Enter" || event.isComposing || at("key-dialog").open) return;
  const isMessage = event.target === at("prompt") && choice("mode") === "chat" && !event.shiftKey;
  if (isMessage || event.ctrlKey || event.metaKey) submit(event);
}

function setUp() {
  setUpTheme(at("theme"));
  at("composer").addEventListener("submit", submit);
  at("options").addEventListener("change", change);
  at("key-form").addEventListener("submit", submitKey);
  at("clear").addEventListener("click", clear);
  at("stop-button").addEventListener("click", () => controller?.abort());
  document.addEventListener("keydown", onKey);
  at("show-drafts").addEventListener("change", (event) => {
    at("answers").classList.toggle("plain", !event.target.checked);
  });
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      at("prompt").value = example.textContent;
      at("composer").requestSubmit();
    });
  }
  at("options-fold").open = matchMedia("(min-width: 761px)").matches;
  new ResizeObserver(drawSoon).observe(at("rounds-chart"));
  setMode();
  draw();
}

setUp();
if ((await connect()) === "key") askForKey();
