// What a conversation is: plain values that JSON can hold.
//
// conversation: {id, title, updated, messages: [message]}; updated in ms since 1970.
// message: {role: "user", text} or {role: "assistant", answers: [answer], chosen}.
// answer, one of several to the same message:
//   text, drafter ("auto", "none" or a name), started (ms since 1970),
//   state: "running", "stop", "length", "cancelled" or "failed",
//   error: null or {message, remedy}, timings: null or the server's,
//   kinds: ["plain", "accepted suffix", ...], marks: [length, index into kinds, ...] of its tokens,
//   samples: [ms since the first token, tokens/s, ...], plain: tokens/s without drafting, or null,
//   thought: null or {text, ms, open, marks}: what was thought, for how long, whether it goes on, and
//   its tokens, as those of the text; calls: [{id, name, arguments}], of tools, the arguments a text.

const MAX_SAMPLES = 200; // of one answer; then every other one is dropped
const WINDOW_MS = 1000; // that the live rate is taken over
const MAX_TITLE = 80;
const ORIGINS = ["plain", "accepted", "recovered", "bonus"];
const STATES = ["running", "stop", "length", "cancelled", "failed"];
const recent = new WeakMap(); // of running answers: [[ms, tokens], ...] of the last second

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", updated: Date.now(), messages: [] };
}

export function newAnswer(drafter) {
  return {
    text: "",
    drafter,
    started: Date.now(),
    state: "running",
    error: null,
    timings: null,
    kinds: [],
    marks: [],
    samples: [],
    plain: null,
    thought: null,
    calls: [],
  };
}

/** The answer shown of an assistant's message. */
export function shown(message) {
  return message.answers[message.chosen];
}

/** Adds one chunk of the stream; `elapsed_ms` is the time since the first one, `took_ms` that since
 * the one before. */
export function addChunk(answer, chunk, elapsed_ms, took_ms) {
  const choice = chunk.choices?.[0];
  const ours = chunk.edge_spec;
  const delta = choice?.delta ?? {};
  const tokens = ours?.tokens ?? [];
  const ofThought = tokens.filter(({ kind }) => kind === "reasoning"); // its tags, too
  if (delta.reasoning_content || ofThought.length > 0) {
    addThought(answer, delta.reasoning_content ?? "", ofThought, took_ms);
  } else if (hasText(delta) && answer.thought) {
    answer.thought.open = false;
  }
  answer.text += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) addCall(answer, call);
  const others = tokens.filter(({ kind }) => kind !== "reasoning");
  addTokens(answer, answer.marks, others, delta.content ?? "");
  if (STATES.includes(choice?.finish_reason)) answer.state = choice.finish_reason;
  if (chunk.timings) answer.timings = cleanTimings(chunk.timings);
  if (!ours) return;
  if (isRate(ours.plain_per_second)) answer.plain = ours.plain_per_second;
  const rate = liveRate(answer, elapsed_ms, ours.predicted_n);
  if (isRate(rate)) addSample(answer, elapsed_ms, rate);
}

/** Tokens a second over the last second; undefined until tokens came over some time. */
function liveRate(answer, elapsed_ms, predicted_n) {
  const seen = recent.get(answer) ?? [];
  recent.set(answer, seen);
  seen.push([elapsed_ms, predicted_n]);
  while (elapsed_ms - seen[0][0] > WINDOW_MS) seen.shift();
  const [began_ms, before_n] = seen[0];
  const span_ms = elapsed_ms - began_ms;
  return span_ms > 0 ? ((predicted_n - before_n) / span_ms) * 1e3 : undefined;
}

/** Whether a delta of the stream has anything of an answer; its first one has not. */
export function hasText({ reasoning_content, content, tool_calls }) {
  return Boolean(reasoning_content || content || tool_calls?.length);
}

/** Whether the answer has a thought: an empty one is none. */
export function hasThought({ thought }) {
  return thought !== null && thought.text.trim() !== "";
}

/** Whether the model is thinking. */
export function isThinking(answer) {
  return answer.state === "running" && Boolean(answer.thought?.open);
}

/** Messages as the server takes them, those before `end`, with what was thought: the model's own
 * template knows what it sees again. Questions that got no answer are left out: many models want
 * the two to take turns. */
export function serverMessages({ messages }, system, end) {
  const found = system === "" ? [] : [{ role: "system", content: system }];
  for (let i = 0; i < end; i += 1) {
    const message = messages[i];
    const next = messages[i + 1];
    if (message.role === "assistant") {
      if (isAnswered(shown(message))) found.push(...answerMessages(shown(message)));
    } else if (i + 1 === end || isAnswered(shown(next))) {
      found.push({ role: "user", content: message.text });
    }
  }
  return found;
}

function isAnswered(answer) {
  return answer.text !== "" || hasThought(answer) || answer.calls.length > 0;
}

function answerMessages(answer) {
  const { calls } = answer;
  const message = { role: "assistant", content: answer.text };
  if (hasThought(answer)) message.reasoning_content = answer.thought.text;
  if (calls.length === 0) return [message];
  message.tool_calls = calls.map(({ id, name, arguments: text }) => {
    return { id, type: "function", function: { name, arguments: text } };
  });
  const results = calls.map(({ id }) => {
    return { role: "tool", tool_call_id: id, content: "not run: there is no such tool here" };
  });
  return [message, ...results];
}

/** The first line of a message, shortened. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

/** How many tokens an answer has of each kind, most first: [["accepted suffix", 9], ...]. */
export function kindCounts(answer) {
  const counts = new Map();
  const marks = [...(answer.thought?.marks ?? []), ...answer.marks];
  for (let i = 1; i < marks.length; i += 2) {
    const kind = answer.kinds[marks[i]];
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** The conversation in a value read from storage, which anything may have written; else null. */
export function cleanConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return null;
  const messages = value.messages.map(cleanMessage);
  const roles = ["user", "assistant"];
  const paired = messages.every((message, i) => message?.role === roles[i % 2]);
  if (!paired || messages.length % 2 !== 0) return null;
  const title = typeof value.title === "string" ? value.title.slice(0, 200) : "";
  return { id: value.id, title, updated: number(value.updated) ?? 0, messages };
}

function cleanMessage(value) {
  if (value?.role === "user" && typeof value.text === "string") {
    return { role: "user", text: value.text };
  }
  if (value?.role !== "assistant" || !Array.isArray(value.answers)) return null;
  const answers = value.answers.map(cleanAnswer);
  if (answers.length === 0 || answers.includes(null)) return null;
  const chosen = answers[value.chosen] === undefined ? answers.length - 1 : value.chosen;
  return { role: "assistant", answers, chosen };
}

function cleanAnswer(value) {
  if (typeof value?.text !== "string") return null;
  const answer = { ...newAnswer("auto"), text: value.text, started: number(value.started) ?? 0 };
  if (typeof value.drafter === "string") answer.drafter = value.drafter;
  // One that was running when the page closed is over.
  answer.state = STATES.includes(value.state) ? value.state : "failed";
  if (answer.state === "running") answer.state = "cancelled";
  if (typeof value.error?.message === "string") {
    answer.error = { message: value.error.message, remedy: String(value.error.remedy ?? "") };
  }
  if (value.timings) answer.timings = cleanTimings(value.timings);
  answer.plain = isRate(value.plain) ? value.plain : null;
  answer.samples = numbers(value.samples);
  const kinds = Array.isArray(value.kinds) ? value.kinds : [];
  const known = (marks) => marks.every((mark, i) => i % 2 === 0 || typeof kinds[mark] === "string");
  const [marks, thought] = [numbers(value.marks), cleanThought(value.thought)];
  if (known(marks) && known(thought?.marks ?? [])) Object.assign(answer, { kinds, marks });
  else if (thought) thought.marks = [];
  answer.calls = Array.isArray(value.calls) ? value.calls.filter(isCall) : [];
  return { ...answer, thought };
}

function cleanThought(value) {
  if (typeof value?.text !== "string") return null;
  return { text: value.text, ms: number(value.ms) ?? 0, open: false, marks: numbers(value.marks) };
}

function isCall(value) {
  return ["id", "name", "arguments"].every((name) => typeof value?.[name] === "string");
}

function cleanTimings(value) {
  const timings = {};
  for (const [name, entry] of Object.entries(value)) {
    if (number(entry) !== null) timings[name] = entry;
  }
  timings.acceptance_histogram = cleanCounts(value.acceptance_histogram);
  timings.plain_reasons = cleanCounts(value.plain_reasons);
  return timings;
}

function cleanCounts(value) {
  return Object.fromEntries(Object.entries(value ?? {}).filter(([, n]) => number(n) !== null));
}

function addThought(answer, text, tokens, took_ms) {
  const thought = (answer.thought ??= { text: "", ms: 0, open: true, marks: [] });
  thought.text += text;
  thought.ms += Math.round(took_ms);
  thought.open = true;
  addTokens(answer, thought.marks, tokens, text);
}

// A call comes in pieces: its name with the first one, then its arguments.
function addCall(answer, { index, id, function: called }) {
  answer.calls[index] ??= { id: "", name: "", arguments: "" };
  const call = answer.calls[index];
  call.id += id ?? "";
  call.name += called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

// The tokens of a chunk: those that are none of the text that it `added`, such as the one that ends
// a thought, have the length 0.
function addTokens(answer, marks, tokens, added) {
  let at = 0;
  for (const { text, origin, drafter } of tokens) {
    const known = ORIGINS.includes(origin) ? origin : "plain";
    const kind = drafter ? `${known} ${drafter}` : known;
    let index = answer.kinds.indexOf(kind);
    if (index === -1) index = answer.kinds.push(kind) - 1;
    const length = added.startsWith(text, at) ? text.length : 0;
    marks.push(length, index);
    at += length;
  }
}

function addSample(answer, elapsed_ms, rate) {
  answer.samples.push(Math.round(elapsed_ms), Math.round(rate * 10) / 10);
  if (answer.samples.length <= 2 * MAX_SAMPLES) return;
  answer.samples = answer.samples.filter((_, i) => i % 4 < 2);
}

function isRate(value) {
  return number(value) !== null && value > 0;
}

function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function numbers(value) {
  const fits = Array.isArray(value) && value.length % 2 === 0;
  return fits && value.every((entry) => number(entry) !== null && entry >= 0) ? value : [];
}

// crypto.randomUUID is there for https and loopback only.
function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
