// Numbers in words, and what is told of one answer.

import { drawing, element } from "./dom.js";

const BAR_PX = 140;
const PLAIN_REASONS = {
  off: "speculation was off",
  no_candidate: "nothing to draft",
  below_break_even: "drafting would not have paid",
  cooldown: "pause after wrong draft tokens",
  unsupported: "not possible here",
  shared: "other conversations took the rows",
  draft_failed: "the draft failed",
  draft_full: "the text is longer than the draft can read",
  budget: "no room left to draft",
  baseline: "to time a plain step",
};

/** With two to three significant digits. */
export function rate(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

export function times(value) {
  return `${value.toFixed(2)}×`;
}

export function percent(value) {
  return `${Math.round(100 * value)} %`;
}

export function drafterName(drafter) {
  return drafter === "none" ? "off" : drafter;
}

/** Tokens per second of an answer: the server's figure, while there is none that of the page. */
export function rateOf(answer) {
  if (answer.timings) return answer.timings.predicted_per_second ?? null;
  const elapsed_ms = answer.samples.at(-2);
  return elapsed_ms > 0 ? (numTokens(answer) / elapsed_ms) * 1e3 : null;
}

/** How many times as fast as plain decoding an answer was; null where that is not known. */
export function speedupOf(answer) {
  if (answer.drafter === "none") return null;
  if (answer.timings) return answer.timings.speedup ?? null;
  const own = rateOf(answer);
  return own !== null && answer.plain !== null ? own / answer.plain : null;
}

export function numTokens(answer) {
  return answer.timings?.predicted_n ?? numMarked(answer);
}

function numMarked({ marks, thought }) {
  return (marks.length + (thought?.marks.length ?? 0)) / 2;
}

/** How long was thought, and how much: "for 3.1 s (120 tokens)". */
export function thoughtLine({ ms, marks }) {
  const tokens = marks.length / 2;
  const count = tokens === 0 ? "" : ` (${tokens} token${tokens === 1 ? "" : "s"})`;
  return `for ${seconds(ms)}${count}`;
}

function seconds(ms) {
  const whole = Math.round(ms / 1e3);
  return ms < 10e3 ? `${(ms / 1e3).toFixed(1)} s` : whole < 60 ? `${whole} s` : minutes(whole);
}

function minutes(whole) {
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** One line: rate, speedup, share of accepted draft tokens, tokens a round, length. */
export function statsLine(answer) {
  const live = answer.state === "running" ? answer.samples.at(-1) : undefined;
  const own = live ?? rateOf(answer);
  const speedup = speedupOf(answer);
  const { acceptance_rate: accepted, mean_accepted_length: mean } = answer.timings ?? {};
  const tokens = numTokens(answer);
  const parts = [
    own === null ? null : `${rate(own)} tokens/s`,
    speedup === null ? null : `${times(speedup)} plain`,
    answer.drafter === "none" ? "speculation off" : null,
    accepted === undefined ? null : `${percent(accepted)} accepted`,
    accepted === undefined ? null : `${mean.toFixed(1)} a round`,
    tokens > 0 ? `${tokens} token${tokens === 1 ? "" : "s"}` : null,
  ];
  return parts.filter((part) => part !== null).join(" · ");
}

/** The rest of what the server measured, as a list of terms; null where it sent nothing. */
export function statsDetails(answer) {
  const timings = answer.timings;
  if (timings === null) return null;
  const list = element("dl", { class: "details" });
  const add = (term, value) => list.append(element("dt", {}, term), element("dd", {}, value));
  if (timings.ttft_ms !== undefined) add("First token after", `${timings.ttft_ms.toFixed(0)} ms`);
  if (timings.prompt_n !== undefined) add("Prompt", promptText(timings));
  const { draft_n: drafted, draft_n_accepted: accepted } = timings;
  if (drafted > 0) add("Draft tokens", `${accepted} of ${drafted} accepted`);
  if (timings.rounds !== undefined) add("Rounds", roundsText(timings));
  const histogram = Object.entries(timings.acceptance_histogram);
  if (histogram.length > 0) add("Accepted in a round", bars(histogram));
  return list;
}

function promptText({ prompt_n: read, cache_n: kept, prompt_per_second: speed }) {
  const known = kept > 0 ? `, ${kept} known from before` : "";
  return `${read} tokens read${speed > 0 ? ` at ${rate(speed)}/s` : ""}${known}`;
}

function roundsText({ rounds, plain_rounds: plain, plain_reasons: reasons }) {
  if (!plain) return `${rounds}, none of them plain`;
  const entries = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
  const why = entries.map(([name, count]) => `${PLAIN_REASONS[name] ?? name}: ${count}`);
  return `${rounds}, ${plain} of them plain (${why.join(", ")})`;
}

// How many rounds accepted 0, 1, 2 ... draft tokens.
function bars(histogram) {
  const most = Math.max(...histogram.map(([, count]) => count));
  const rows = histogram.map(([accepted, count]) => {
    const rect = drawing("rect", { width: Math.max(2, (count / most) * BAR_PX), height: 8, rx: 2 });
    const bar = drawing("svg", { width: BAR_PX, height: 8, "aria-hidden": "true" }, rect);
    const cells = [bar, `${count}`].map((cell) => element("td", {}, cell));
    return element("tr", {}, element("th", {}, accepted), ...cells);
  });
  return element("table", { class: "histogram" }, ...rows);
}
