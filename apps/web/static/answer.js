// One answer on the screen: its text, its figures, and what can be done with it.

import { shown } from "./conversation.js";
import { element, icon, iconButton } from "./dom.js";
import { drafterName, statsDetails, statsLine } from "./figures.js";
import { StreamingMarkdown } from "./markdown.js";
import { StreamingTokens, legend } from "./tokens.js";

const NOTES = {
  length: "It ends here because the limit of tokens, or the end of the context, was reached.",
  cancelled: "You stopped it here.",
};

/** `actions`: regenerate(), retry() and choose(step), about this message; copy(text, button). */
export class AnswerView {
  #message;
  #actions;
  #tokens;
  #answer = null; // the one that is drawn
  #content = element("div", {});
  #renderer = null;
  #below = element("div", { class: "below" });
  #line = element("summary", { class: "stats" });

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
    if (answer !== this.#answer) this.#begin(answer);
    this.#renderer.show(this.#tokens ? answer : answer.text);
    this.node.setAttribute("aria-busy", String(running));
    this.node.classList.toggle("running", running);
    if (running) this.#line.textContent = statsLine(answer) || "Reading the prompt…";
    else this.finish();
  }

  /** Draws what stands below the text, once the answer is over. */
  finish() {
    const answer = shown(this.#message);
    const note = NOTES[answer.state];
    const parts = [
      note === undefined ? null : element("p", { class: "note" }, note),
      answer.error === null ? null : this.#error(answer.error),
      this.#tokens && answer.marks.length > 0 ? legend(answer) : null,
      element("footer", {}, this.#stats(answer), this.#buttons(answer)),
    ];
    this.#below.replaceChildren(...parts.filter((part) => part !== null));
  }

  #begin(answer) {
    this.#answer = answer;
    this.#content.className = this.#tokens ? "tokens" : "prose";
    const Renderer = this.#tokens ? StreamingTokens : StreamingMarkdown;
    this.#renderer = new Renderer(this.#content);
    this.#below.replaceChildren(element("footer", {}, this.#line));
  }

  #error({ message, remedy }) {
    const again = element("button", { type: "button", on: { click: this.#actions.retry } }, "Try again");
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
  #edit = element("button", { type: "button", class: "quiet", "aria-label": "Edit", title: "Edit" }, icon("edit"));

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.node = element("article", { class: "question", "aria-label": "You" });
    this.#edit.addEventListener("click", () => this.#open());
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
