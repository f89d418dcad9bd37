// The table of `edge-spec plan`: where the model runs best here, and what drafting gains.

import { element } from "./dom.js";
import { percent, rate, times } from "./figures.js";

const COLUMNS = ["Where", "Weights", "Drafter"];
const NUMBERS = ["Tokens/s", "Speedup", "Accepted", "Memory"];
const MAX_ROWS = 12;

/** Nodes for a plan as the server sends it; an explanation where nothing was measured. */
export function planNodes(plan) {
  const placements = Array.isArray(plan?.placements) ? plan.placements : [];
  if (placements.length === 0) return [...missing()];
  const intro = "Measured on this machine: drafters at the best place, then other places.";
  const names = [...COLUMNS, ...NUMBERS, "Why not first"];
  const head = rowNode("th", names);
  const rows = placements.slice(0, MAX_ROWS).map(row);
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  const nodes = [element("p", {}, intro), element("div", { class: "wide", tabindex: "0" }, table)];
  const left = placements.length - rows.length;
  if (left > 0) nodes.push(element("p", { class: "note" }, `${left} others are not shown.`));
  return nodes;
}

function* missing() {
  yield element("p", {}, "Nothing has been measured for this model on this machine yet.");
  const command = element("code", {}, "edge-spec plan");
  const what = `with the model's name in a terminal. It times the runtimes and devices that are
    here and the drafters at the best place; the next start runs the model where it is fastest.`;
  yield element("p", {}, "Run ", command, ` ${what}`);
}

function row(placement, index) {
  const { target, draft, drafter } = placement;
  const where = draft ? `${place(target)}, draft on ${place(draft)}` : place(target);
  const cells = [
    where,
    target.weights,
    drafter,
    known(placement.tokens_per_s, rate),
    known(placement.speedup, times),
    known(placement.acceptance, percent),
    known(placement.memory_bytes, (bytes) => `${Math.round(bytes / 1e6)} MB`),
    index === 0 ? element("strong", {}, "the best") : placement.reason,
  ];
  return rowNode("td", cells);
}

function rowNode(tag, cells) {
  const kind = (i) => (i >= COLUMNS.length && i < cells.length - 1 ? "number" : null);
  return element("tr", {}, ...cells.map((cell, i) => element(tag, { class: kind(i) }, cell)));
}

function place({ runtime, device, threads }) {
  return threads === null ? `${runtime} ${device}` : `${runtime} ${device}, ${threads} threads`;
}

function known(value, format) {
  return typeof value === "number" ? format(value) : "–";
}
