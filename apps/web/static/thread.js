// The messages of the conversation that is open, and where the reader is in it.

import { AnswerView, QuestionView } from "./answer.js";
import { element } from "./dom.js";

const MAX_SHOWN = 40; // messages: earlier ones are drawn on demand
const NEAR_END_PX = 48;

export class Thread {
  #scroller;
  #list;
  #toEnd;
  #actions;
  #conversation = null;
  #first = 0; // message that is drawn
  #views = new Map(); // by message
  #tokens = false;
  #follows = true; // new text keeps the end in sight

  /** `actions`: edit(index, text), regenerate(index), retry(index), choose(index, step), copy(text,
   * button). */
  constructor(scroller, list, toEnd, actions) {
    this.#scroller = scroller;
    this.#list = list;
    this.#toEnd = toEnd;
    this.#actions = actions;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    toEnd.addEventListener("click", () => this.scrollToEnd());
  }

  /** Draws a conversation, from its end. */
  show(conversation) {
    this.#conversation = conversation;
    this.#first = Math.max(0, conversation.messages.length - MAX_SHOWN);
    this.#draw();
    this.scrollToEnd();
  }

  set tokens(tokens) {
    this.#tokens = tokens;
    for (const view of this.#views.values()) {
      if (view instanceof AnswerView) view.tokens = tokens;
    }
    this.#keepEnd();
  }

  /** Draws an answer's message again as far as it has changed; nothing where it is not on screen. */
  update(message) {
    this.#views.get(message)?.update();
    this.#keepEnd();
  }

  scrollToEnd() {
    this.#follows = true;
    this.#keepEnd();
  }

  #draw() {
    this.#views.clear();
    const { messages } = this.#conversation;
    const nodes = messages.slice(this.#first).map((message, i) => {
      const view = this.#view(message, this.#first + i);
      this.#views.set(message, view);
      return view.node;
    });
    this.#list.replaceChildren(...(this.#first > 0 ? [this.#earlier()] : []), ...nodes);
  }

  #view(message, index) {
    if (message.role === "user") {
      return new QuestionView(message, { edit: (text) => this.#actions.edit(index, text) });
    }
    const actions = {
      regenerate: () => this.#actions.regenerate(index),
      retry: () => this.#actions.retry(index),
      choose: (step) => this.#actions.choose(index, step),
      copy: this.#actions.copy,
    };
    return new AnswerView(message, actions, this.#tokens);
  }

  #earlier() {
    const show = () => {
      const fromEnd = this.#scroller.scrollHeight - this.#scroller.scrollTop;
      this.#first = Math.max(0, this.#first - MAX_SHOWN);
      this.#draw();
      this.#scroller.scrollTop = this.#scroller.scrollHeight - fromEnd;
    };
    const text = `Show earlier messages (${this.#first})`;
    return element("button", { type: "button", class: "earlier", on: { click: show } }, text);
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.#toEnd.hidden = this.#follows;
  }

  #keepEnd() {
    if (this.#follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#toEnd.hidden = this.#follows;
  }
}
