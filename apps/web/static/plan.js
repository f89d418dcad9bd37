// The plan in force: what runs the model, who drafts, and what would be faster here.

import { element } from "./dom.js";

/** Nodes for the lines of a plan as the server sends it. */
export function planNodes({ plan }) {
  return plan.map((line) => {
    const [what, ...rest] = line.split(": ");
    return element("p", {}, element("strong", {}, `${what}: `), rest.join(": "));
  });
}
