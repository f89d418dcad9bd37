// Rates of answers over their time, one beside the other, as a drawing.

import { drawing } from "./dom.js";
import { drafterName, rate } from "./figures.js";

const HEIGHT_PX = 190;
const TOP_PX = 8;
const BOTTOM_PX = 24; // for the labels of the answers
const LEFT_PX = 34; // for the labels of the rates
const GAP_PX = 10; // between two answers
const SHORTEST_MS = 500; // the least time that gets room: a short answer stays visible

/**
 * An SVG of `answers`, from left to right on one scale of rates: a line each, solid with
 * speculation and dashed without, and the rate of plain decoding as a thin one. Its text
 * alternative is `label`.
 */
export function rateChart(answers, width_px, label) {
  const chart = drawing("svg", {
    class: "chart",
    role: "img",
    "aria-label": label,
    viewBox: `0 0 ${width_px} ${HEIGHT_PX}`,
    width: width_px,
    height: HEIGHT_PX,
  });
  const ticks = niceTicks(Math.max(1, ...answers.flatMap(rates)));
  const y = (value) => HEIGHT_PX - BOTTOM_PX - (value / ticks.at(-1)) * (HEIGHT_PX - BOTTOM_PX - TOP_PX);
  for (const tick of ticks) {
    const line = { class: "grid", x1: LEFT_PX, x2: width_px, y1: y(tick), y2: y(tick) };
    const text = { class: "tick", x: LEFT_PX - 6, y: y(tick) + 4, "text-anchor": "end" };
    chart.append(drawing("line", line), drawing("text", text, `${tick}`));
  }
  const spans_ms = answers.map((answer) => Math.max(SHORTEST_MS, answer.samples.at(-2) ?? 0));
  const total_ms = spans_ms.reduce((sum, span) => sum + span, 0);
  const room_px = width_px - LEFT_PX - GAP_PX * (answers.length - 1);
  let left = LEFT_PX;
  answers.forEach((answer, i) => {
    const width = (spans_ms[i] / total_ms) * room_px;
    chart.append(answerGroup(answer, i + 1, { left, width, span_ms: spans_ms[i], y }));
    left += width + GAP_PX;
  });
  return chart;
}

function answerGroup(answer, number, { left, width, span_ms, y }) {
  const group = drawing("g", { class: answer.drafter === "none" ? "off" : "on" });
  const base = { x1: left, x2: left + width };
  group.append(drawing("line", { class: "axis", ...base, y1: y(0), y2: y(0) }));
  if (answer.plain !== null) {
    group.append(drawing("line", { class: "plain", ...base, y1: y(answer.plain), y2: y(answer.plain) }));
  }
  const points = [];
  for (let i = 0; i < answer.samples.length; i += 2) {
    const x = left + (answer.samples[i] / span_ms) * width;
    points.push(`${x.toFixed(1)},${y(answer.samples[i + 1]).toFixed(1)}`);
  }
  if (points.length > 0) group.append(drawing("polyline", { class: "rate", points: points.join(" ") }));
  // Its number, and who drafted where there is room for that.
  const name = `${number} ${drafterName(answer.drafter)}`;
  const text = name.length * 7 < width ? name : `${number}`;
  const middle = { class: "tick", x: left + width / 2, y: HEIGHT_PX - 8, "text-anchor": "middle" };
  group.append(drawing("text", middle, text));
  return group;
}

function rates(answer) {
  const live = answer.samples.filter((_, i) => i % 2 === 1);
  return answer.plain === null ? live : [...live, answer.plain];
}

// From 0 up to at least `most`, in four steps or fewer of 1, 2 or 5 times a power of ten.
function niceTicks(most) {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [0];
  while (ticks.at(-1) < most) ticks.push(Number((ticks.at(-1) + step).toPrecision(3)));
  return ticks;
}

/** The chart in a sentence. */
export function chartLabel(answers) {
  const each = answers.map((answer, i) => {
    const last = answer.samples.at(-1);
    const shown = last === undefined ? "no rate" : `${rate(last)} tokens/s`;
    return `answer ${i + 1}, speculation ${drafterName(answer.drafter)}: ${shown} at its end`;
  });
  return `Tokens per second over the time of each answer. ${each.join("; ")}.`;
}
