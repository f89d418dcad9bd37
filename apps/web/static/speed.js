// The panel that shows how fast the answers of a conversation were, with speculation and without.

import { chartLabel, rateChart } from "./chart.js";
import { element } from "./dom.js";
import { drafterName, numTokens, rate, rateOf, speedupOf, times } from "./figures.js";

const MAX_ANSWERS = 6; // side by side: the latest
const DRAW_EVERY_MS = 200;

export class SpeedPanel {
  #node;
  #conversation = null;
  #drawn_ms = 0;
  #timer = null;

  constructor(node) {
    this.#node = node;
    new ResizeObserver(() => this.#draw()).observe(node);
  }

  /** Shows a conversation; while answers are written, call it as often as they change. */
  update(conversation) {
    const other = conversation !== this.#conversation;
    this.#conversation = conversation;
    const wait_ms = other ? 0 : this.#drawn_ms + DRAW_EVERY_MS - performance.now();
    if (wait_ms <= 0) this.#draw();
    else this.#timer ??= setTimeout(() => this.#draw(), wait_ms);
  }

  #draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (this.#conversation === null || this.#node.clientWidth === 0) return; // not to be seen
    this.#drawn_ms = performance.now();
    const answers = answersOf(this.#conversation).slice(-MAX_ANSWERS);
    if (answers.length === 0) {
      const text = "Ask something: the rate of each answer is drawn here while it is written.";
      this.#node.replaceChildren(element("p", { class: "note" }, text));
      return;
    }
    const width_px = this.#node.clientWidth;
    const chart = rateChart(answers, width_px, chartLabel(answers));
    const parts = [summary(answers), chart, chartLegend(), table(answers)];
    this.#node.replaceChildren(...parts, ...promise(answers));
  }
}

// In the order in which they were asked for.
function answersOf(conversation) {
  const answers = conversation.messages.flatMap((message) => message.answers ?? []);
  return answers
    .filter((answer) => answer.samples.length > 0 || answer.timings !== null)
    .sort((a, b) => a.started - b.started);
}

// Both rates over all answers, each weighted by its length.
function summary(answers) {
  const drafted = meanRate(answers.filter(({ drafter }) => drafter !== "none"));
  const plain = meanRate(answers.filter(({ drafter }) => drafter === "none"));
  const line = element("p", { class: "summary" });
  if (drafted !== null && plain !== null) {
    const rates = `${rate(drafted)} tokens/s, ${rate(plain)} without`;
    line.append(strong(times(drafted / plain)), ` as fast with speculation: ${rates}.`);
  } else if (drafted !== null) {
    const compare = "Set it to off and answer again to compare.";
    line.append(strong(rate(drafted)), ` tokens/s with speculation. ${compare}`);
  } else if (plain !== null) {
    const compare = "Set it to auto and answer again to compare.";
    line.append(strong(rate(plain)), ` tokens/s without speculation. ${compare}`);
  }
  return line;
}

// What holds for texts with speculation and without it, as the last answer tells.
function promise(answers) {
  const told = answers.map(({ timings }) => timings?.lossless).filter(Boolean).at(-1);
  return told ? [element("p", { class: "note" }, `Texts with and without: ${told}.`)] : [];
}

function strong(text) {
  return element("strong", {}, text);
}

function meanRate(answers) {
  const measured = answers.filter((answer) => rateOf(answer) > 0);
  const tokens = measured.reduce((sum, answer) => sum + numTokens(answer), 0);
  const seconds = measured.reduce((sum, answer) => sum + numTokens(answer) / rateOf(answer), 0);
  return seconds > 0 ? tokens / seconds : null;
}

function chartLegend() {
  const item = (name, text) => element("li", {}, element("span", { class: `line ${name}` }), text);
  return element(
    "ul",
    { class: "legend", "aria-hidden": "true" },
    item("on", "with speculation"),
    item("off", "without"),
    item("plain", "measured plain rate"),
  );
}

function table(answers) {
  const names = ["Answer", "Speculation", "Tokens/s", "Speedup"];
  const head = element("tr", {}, ...names.map((name) => element("th", {}, name)));
  const rows = answers.map((answer, i) => {
    const [own, speedup] = [rateOf(answer), speedupOf(answer)];
    const cells = [
      `${i + 1}`,
      drafterName(answer.drafter),
      own === null ? "–" : rate(own),
      speedup === null ? "–" : times(speedup),
    ];
    return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
  });
  const body = element("tbody", {}, ...rows);
  return element("table", { class: "rates" }, element("thead", {}, head), body);
}
