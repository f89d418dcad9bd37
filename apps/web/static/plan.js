// The table of `edge-spec plan`: where the model runs best on this machine, and who should draft.

import { element } from "./dom.js";
import { percent, rate, times } from "./figures.js";

const COLUMNS = ["Where", "Weights", "Drafter", "Tokens/s", "Speedup", "Accepted", "Memory", "Why not first"];
const MAX_ROWS = 12;

/** Nodes for a plan as the server sends it; an explanation where nothing was measured. */
export function planNodes(plan) {
  const placements = Array.isArray(plan?.placements) ? plan.placements : [];
  if (placements.length === 0) return [...missing()];
  const intro = "Forecasts from passes that were timed on this machine, the best first.";
  const head = element("tr", {}, ...COLUMNS.map((name, i) => element("th", { class: kind(i) }, name)));
  const rows = placements.slice(0, MAX_ROWS).map(row);
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  const left = placements.length - rows.length;
  const more = left > 0 ? [element("p", { class: "note" }, `${left} slower ones are not shown.`)] : [];
  return [element("p", {}, intro), element("div", { class: "wide", tabindex: "0" }, table), ...more];
}

function* missing() {
  yield element("p", {}, "Nothing has been measured for this model on this machine yet.");
  const command = element("code", {}, "edge-spec plan");
  yield element("p", {}, "Run ", command, " with the model's name in a terminal. It times the runtimes and devices that are here, with and without each drafter, and the next start runs the model as planned.");
}

function row(placement, index) {
  const { target, draft, drafter, tokens_per_s, speedup, acceptance, memory_bytes, reason } = placement;
  const where = draft ? `${place(target)}, draft on ${place(draft)}` : place(target);
  const cells = [
    where,
    target.weights,
    drafter,
    known(tokens_per_s, rate),
    known(speedup, times),
    known(acceptance, percent),
    known(memory_bytes, (bytes) => `${Math.round(bytes / 1e6)} MB`),
    index === 0 ? element("strong", {}, "the best") : reason,
  ];
  return element("tr", {}, ...cells.map((cell, i) => element("td", { class: kind(i) }, cell)));
}

function place({ runtime, device, threads }) {
  return threads === null ? `${runtime} ${device}` : `${runtime} ${device}, ${threads} threads`;
}

function known(value, format) {
  return typeof value === "number" ? format(value) : "–";
}

function kind(column) {
  return column >= 3 && column <= 6 ? "number" : null;
}
