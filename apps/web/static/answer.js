// One answer on the screen: its text, its figures, and what can be done with it.

import { hasThought, shown } from "./conversation.js";
import { element, iconButton } from "./dom.js";
import { drafterName, numTokens, statsDetails, statsLine } from "./figures.js";
import { StreamingMarkdown } from "./markdown.js";
import { ThoughtView, callNode } from "./thought.js";
import { StreamingTokens, legend } from "./tokens.js";

const NOTES = {
  length: "It ends here because the limit of tokens, or the end of the context, was reached.",
  cancelled: "It was stopped here.",
};
const IN_THOUGHT = {
  length: "The limit of tokens, or the end of the context, was reached within the thought.",
  cancelled: "It was stopped within the thought.",
  stop: "The model ended its answer within the thought.",
};

/** `actions`: regenerate(), retry() and choose(step), about this message; copy(text, button). */
export class AnswerView {
  #message;
  #actions;
  #tokens;
  #answer = null; // the one that is drawn
  #thought = null; // from the first of its tokens on
  #content = element("div", {});
  #calls = null; // from the first one on
  #renderer = null;
  #below = element("div", { class: "below" });
  #line = element("span", { class: "stats" });

  constructor(message, actions, tokens) {
    this.#message = message;
    this.#actions = actions;
    this.#tokens = tokens;
    this.node = element("article", { class: "answer", "aria-label": "Answer" });
    this.node.append(this.#content, this.#below);
    this.update();
  }

  /** Whether the text is shown as tokens. */
  set tokens(tokens) {
    this.#tokens = tokens;
    this.#answer = null;
    this.update();
  }

  /** Draws what has changed since the last time. */
  update() {
    const answer = shown(this.#message);
    const running = answer.state === "running";
    const { activeElement } = document;
    const focused = this.#below.contains(activeElement) && activeElement.ariaLabel;
    if (answer !== this.#answer) this.#begin(answer);
    if (hasThought(answer)) this.#showThought(answer);
    this.#renderer.show(this.#tokens ? answer : answer.text);
    if (answer.calls.length > 0) this.#showCalls(answer.calls);
    this.node.setAttribute("aria-busy", String(running));
    this.node.classList.toggle("running", running);
    if (running) this.#line.textContent = statsLine(answer) || "Reading the prompt…";
    else this.#finish(focused);
  }

  // Draws what stands below the text, once the answer is over.
  #finish(focused) {
    const answer = shown(this.#message);
    const isEmpty = answer.text === "" && answer.calls.length === 0;
    const note = (hasThought(answer) && isEmpty ? IN_THOUGHT : NOTES)[answer.state];
    const parts = [
      note === undefined ? null : element("p", { class: "note" }, note),
      answer.error === null ? null : this.#error(answer.error),
      this.#tokens && numTokens(answer) > 0 ? legend(answer) : null,
      element("footer", {}, this.#stats(answer), this.#buttons(answer)),
    ];
    this.#below.replaceChildren(...parts.filter((part) => part !== null));
    if (focused) this.#buttonLike(focused)?.focus();
  }

  // The button that took the place of one with this label; where it cannot be used, one beside it.
  #buttonLike(label) {
    return this.#below.querySelector(`[aria-label="${label}"]:enabled, .versions :enabled`);
  }

  #begin(answer) {
    this.#answer = answer;
    for (const node of [this.#thought?.node, this.#calls]) node?.remove();
    this.#thought = this.#calls = null;
    this.#content.className = this.#tokens ? "tokens" : "prose";
    const Renderer = this.#tokens ? StreamingTokens : StreamingMarkdown;
    this.#renderer = new Renderer(this.#content);
    this.#below.replaceChildren(element("footer", {}, this.#line));
  }

  #showThought(answer) {
    if (this.#thought === null) {
      this.#thought = new ThoughtView(this.#tokens);
      this.node.prepend(this.#thought.node);
    }
    this.#thought.update(answer);
  }

  #showCalls(calls) {
    if (this.#calls === null) {
      this.#calls = element("div", { class: "prose" });
      this.#below.before(this.#calls);
    }
    this.#calls.replaceChildren(...calls.map(callNode));
  }

  #error({ message, remedy }) {
    const attributes = { type: "button", on: { click: this.#actions.retry } };
    const again = element("button", attributes, "Try again");
    return element("div", { class: "error" }, element("p", {}, `${message} ${remedy}`), again);
  }

  #stats(answer) {
    const details = statsDetails(answer);
    const line = statsLine(answer);
    if (details === null) return element("span", { class: "stats" }, line);
    return element("details", {}, element("summary", { class: "stats" }, line), details);
  }

  #buttons(answer) {
    const copyText = ({ currentTarget }) => this.#actions.copy(answer.text, currentTarget);
    const copy = iconButton("copy", "Copy the answer", copyText);
    const again = iconButton("again", "Answer again", this.#actions.regenerate);
    again.classList.add("regenerate");
    return element("div", { class: "actions" }, this.#versions(answer), copy, again);
  }

  #versions(answer) {
    const { answers, chosen } = this.#message;
    if (answers.length < 2) return null;
    const step = (by, label, name) => {
      const button = iconButton(name, label, () => this.#actions.choose(by));
      button.disabled = answers[chosen + by] === undefined;
      return button;
    };
    const text = `${chosen + 1} of ${answers.length}, ${drafterName(answer.drafter)}`;
    return element(
      "span",
      { class: "versions" },
      step(-1, "Earlier answer", "left"),
      text,
      step(1, "Later answer", "right"),
    );
  }
}

/** A message of the user's, with `actions.edit(text)`. */
export class QuestionView {
  #message;
  #actions;
  #edit = iconButton("edit", "Edit", () => this.#open());

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.node = element("article", { class: "question", "aria-label": "You" });
    this.#close();
  }

  #close() {
    const text = element("div", { class: "bubble" }, this.#message.text);
    this.node.replaceChildren(this.#edit, text);
  }

  #open() {
    const area = element("textarea", { "aria-label": "Edit your message", rows: 3 });
    area.value = this.#message.text;
    const cancel = element("button", { type: "button" }, "Cancel");
    const send = element("button", { class: "primary" }, "Send");
    const hint = element("p", { class: "note" }, "What follows this message is removed.");
    const form = element("form", { class: "edit" }, area, hint, cancel, send);
    const close = () => {
      this.#close();
      this.#edit.focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "") this.#actions.edit(area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.node.replaceChildren(form);
    area.focus();
  }
}
