// What a model thought before its answer, folded once it has ended, and the calls that it wrote.

import { isThinking } from "./conversation.js";
import { element } from "./dom.js";
import { thoughtLine } from "./figures.js";
import { StreamingMarkdown, codeBlock } from "./markdown.js";
import { StreamingTokens } from "./tokens.js";

/** A thought is shown while it is written, then folded to one line; who opens or closes it by hand
 * has it stay so. */
export class ThoughtView {
  #summary = element("summary", { on: { click: () => (this.#byHand = true) } });
  #content = element("div", {});
  #byHand = false;
  #tokens;
  #renderer;

  constructor(tokens) {
    this.#tokens = tokens;
    this.#content.className = tokens ? "tokens" : "prose";
    this.#renderer = new (tokens ? StreamingTokens : StreamingMarkdown)(this.#content);
    this.node = element("details", { class: "thought" }, this.#summary, this.#content);
  }

  /** Draws what has changed since the last time; the answer has a thought. */
  update(answer) {
    const { thought, kinds } = answer;
    const thinking = isThinking(answer);
    const text = `${thinking ? "Thinking" : "Thought"} ${thoughtLine(thought)}`;
    if (this.#summary.textContent !== text) this.#summary.textContent = text;
    const follows = this.#atEnd();
    this.#renderer.show(this.#tokens ? { ...thought, kinds } : thought.text);
    this.node.classList.toggle("thinking", thinking);
    if (!this.#byHand && !this.#isRead()) this.node.open = thinking;
    if (thinking && follows) this.#content.scrollTop = this.#content.scrollHeight;
  }

  #atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#content;
    return scrollHeight - scrollTop - clientHeight < 24;
  }

  // Whether the keyboard is inside, which folding would throw out.
  #isRead() {
    return this.#content.contains(document.activeElement);
  }
}

/** What the model wrote to call a tool: its name, and its arguments, one a line where they are
 * complete. */
export function callNode({ name, arguments: text }) {
  const node = codeBlock({ language: `Call of ${name}`, text: spread(text) });
  node.classList.add("call");
  return node;
}

function spread(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
