// What a conversation is: plain values that JSON can hold.
//
// conversation: {id, title, updated, messages: [message]}; updated in ms since 1970.
// message: {role: "user", text} or {role: "assistant", answers: [answer], chosen}.
// answer, one of several to the same message:
//   text, drafter ("auto", "none" or a name), started (ms since 1970),
//   state: "running", "stop", "length", "cancelled" or "failed",
//   error: null or {message, remedy}, timings: null or the server's,
//   kinds: ["plain", "accepted suffix", ...], marks: [length, index into kinds, ...] of its tokens,
//   samples: [ms since the first token, tokens/s, ...], plain: tokens/s without drafting, or null.

const MAX_SAMPLES = 200; // of one answer; then every other one is dropped
const MAX_TITLE = 80;
const ORIGINS = ["plain", "accepted", "recovered", "bonus"];
const STATES = ["running", "stop", "length", "cancelled", "failed"];

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
  };
}

/** The answer shown of an assistant's message. */
export function shown(message) {
  return message.answers[message.chosen];
}

/** Adds one chunk of the stream; `elapsed_ms` is the time since the first one. */
export function addChunk(answer, chunk, elapsed_ms) {
  const choice = chunk.choices?.[0];
  answer.text += choice?.delta?.content ?? "";
  if (STATES.includes(choice?.finish_reason)) answer.state = choice.finish_reason;
  if (chunk.timings) answer.timings = cleanTimings(chunk.timings);
  const ours = chunk.edge_spec;
  if (!ours) return;
  for (const token of ours.tokens ?? []) addToken(answer, token);
  if (isRate(ours.plain_per_second)) answer.plain = ours.plain_per_second;
  if (isRate(ours.live_per_second)) addSample(answer, elapsed_ms, ours.live_per_second);
}

/** Messages as the server takes them, those before `end`. Questions that got no answer are left
 * out: many models want the two to take turns. */
export function serverMessages({ messages }, system, end) {
  const found = system === "" ? [] : [{ role: "system", content: system }];
  for (let i = 0; i < end; i += 1) {
    const message = messages[i];
    const next = messages[i + 1];
    if (message.role === "assistant") {
      const { text } = shown(message);
      if (text !== "") found.push({ role: "assistant", content: text });
    } else if (i + 1 === end || shown(next).text !== "") {
      found.push({ role: "user", content: message.text });
    }
  }
  return found;
}

/** The first line of a message, shortened. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

/** How many tokens an answer has of each kind, most first: [["accepted suffix", 9], ...]. */
export function kindCounts(answer) {
  const counts = new Map();
  for (let i = 1; i < answer.marks.length; i += 2) {
    const kind = answer.kinds[answer.marks[i]];
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
  const marks = numbers(value.marks);
  const fits = marks.every((mark, i) => i % 2 === 0 || typeof kinds[mark] === "string");
  if (fits) Object.assign(answer, { kinds, marks });
  return answer;
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

function addToken(answer, { text, origin, drafter }) {
  const known = ORIGINS.includes(origin) ? origin : "plain";
  const kind = drafter ? `${known} ${drafter}` : known;
  let index = answer.kinds.indexOf(kind);
  if (index === -1) index = answer.kinds.push(kind) - 1;
  answer.marks.push(text.length, index);
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
