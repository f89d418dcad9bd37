// The text of an answer with each token marked by where it came from.

import { element } from "./dom.js";
import { kindCounts } from "./conversation.js";

const MEANING = {
  plain: "the model's, without a draft token",
  accepted: "drafted and confirmed by the model",
  recovered: "the model's, after a wrong draft token",
  bonus: "the model's, after draft tokens that were all right",
};

/** Shows the tokens of an answer that grows; only new ones are added to `parent`. */
export class StreamingTokens {
  #parent;
  #shown = 0; // of answer.marks
  #offset = 0; // in the text, of the first token that is not shown
  #rest = document.createTextNode(""); // text that no token was told of

  constructor(parent) {
    this.#parent = parent;
    parent.replaceChildren(this.#rest);
  }

  show(answer) {
    const added = document.createDocumentFragment();
    for (; this.#shown < answer.marks.length; this.#shown += 2) {
      const text = answer.text.slice(this.#offset, this.#offset + answer.marks[this.#shown]);
      this.#offset += text.length;
      if (text !== "") added.append(tokenNode(text, answer.kinds[answer.marks[this.#shown + 1]]));
    }
    this.#parent.insertBefore(added, this.#rest);
    this.#rest.data = answer.text.slice(this.#offset);
  }
}

/** What the marks mean, with the number of tokens of each kind. */
export function legend(answer) {
  const items = kindCounts(answer).map(([kind, count]) => {
    const [origin, drafter] = parts(kind);
    const sample = element("span", { class: `token ${origin}` }, origin);
    const by = drafter === "" ? "" : ` by ${drafter}`;
    return element("li", { title: MEANING[origin] }, sample, `${by} ${count}`);
  });
  return element("ul", { class: "legend", "aria-label": "Tokens by origin" }, ...items);
}

function tokenNode(text, kind) {
  const [origin, drafter] = parts(kind);
  const title = drafter === "" ? MEANING[origin] : `${MEANING[origin]}: ${drafter}`;
  return element("span", { class: `token ${origin}`, title }, text);
}

function parts(kind) {
  const [origin, ...drafter] = kind.split(" ");
  return [Object.hasOwn(MEANING, origin) ? origin : "plain", drafter.join(" ")];
}
