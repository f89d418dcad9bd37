// The conversations and the answers that are being written for them, one at a time for each.

import { newAnswer, newConversation, serverMessages, shown, titleOf } from "./conversation.js";
import { statsLine } from "./figures.js";
import { requestBody, runAnswer } from "./run.js";

const KEEP_EVERY_MS = 2000; // while an answer is written, so that a reload loses little

export class Chats {
  current = newConversation(); // the one that is open
  model = ""; // as the server calls it
  running = new Map(); // conversation id: AbortController
  #closing = false;
  #store;
  #settings;
  #events;

  /**
   * `events`: changed({opened}) after anything but a piece of text, streamed(message) for that, at
   * most once a frame; said(text) for who listens to the page; refused(error, retry) where an
   * answer failed.
   */
  constructor(store, settings, events) {
    this.#store = store;
    this.#settings = settings;
    this.#events = events;
  }

  /** Opens a conversation; a new one where there is none with this id. */
  open(id) {
    this.current = this.#store.get(id) ?? newConversation();
    this.#events.changed({ opened: true });
  }

  send(text) {
    const { current } = this;
    if (current.title === "") current.title = titleOf(text);
    current.messages.push({ role: "user", text });
    this.#ask(current);
  }

  /** Sends another text for the message at this index; what followed it is removed. */
  edit(index, text) {
    if (this.running.has(this.current.id)) return;
    this.current.messages.length = index;
    this.send(text);
  }

  /** One more answer, with the settings of now, beside those that are there. */
  regenerate(index) {
    const message = this.current.messages[index];
    if (this.running.has(this.current.id)) return;
    message.chosen = message.answers.push(newAnswer(this.#settings.values.drafter)) - 1;
    this.#run(this.current, message);
  }

  /** The answer once more, in the place of one that failed. */
  retry(index) {
    const message = this.current.messages[index];
    if (this.running.has(this.current.id)) return;
    message.answers[message.chosen] = newAnswer(this.#settings.values.drafter);
    this.#run(this.current, message);
  }

  /** Shows the answer before (-1) or after (1) the one that is shown. */
  choose(index, step) {
    this.current.messages[index].chosen += step;
    this.#store.save(this.current);
    this.#events.streamed(this.current.messages[index]);
  }

  /** Stops the answer of the open conversation; what there is of it stays. */
  stop() {
    this.running.get(this.current.id)?.abort();
  }

  rename(id, title) {
    const conversation = this.#store.get(id);
    conversation.title = title;
    this.#store.save(conversation);
    this.#events.changed({ opened: false });
  }

  remove(id) {
    this.running.get(id)?.abort();
    this.#store.remove(id);
    if (id === this.current.id) this.open(this.#store.all()[0]?.id);
    else this.#events.changed({ opened: false });
  }

  /** Takes back a conversation that was removed. */
  restore(conversation) {
    this.#store.save(conversation);
    this.open(conversation.id);
  }

  /** Saves what is being written, since the page closes; how it ends is not told any more. */
  keep() {
    this.#closing = true;
    for (const id of this.running.keys()) {
      const conversation = this.#store.get(id);
      if (conversation) this.#store.save(conversation);
    }
  }

  #ask(conversation) {
    const answers = [newAnswer(this.#settings.values.drafter)];
    const message = { role: "assistant", answers, chosen: 0 };
    conversation.messages.push(message);
    this.#run(conversation, message);
  }

  async #run(conversation, message) {
    const { model } = this; // another one may be chosen meanwhile
    const { values } = this.#settings;
    const answer = shown(message);
    const index = conversation.messages.indexOf(message);
    const before = serverMessages(conversation, values.system, index);
    const controller = new AbortController();
    this.running.set(conversation.id, controller);
    conversation.updated = Date.now();
    this.#store.save(conversation);
    this.#events.changed({ opened: true });
    this.#events.said("The model answers.");
    const makers = await this.#settings.makersSampling(model);
    const body = requestBody(model, before, answer.drafter, values, makers);
    const paint = this.#painter(conversation, message);
    const error = await runAnswer(answer, body, controller.signal, paint);
    this.running.delete(conversation.id);
    if (this.#closing) return;
    this.#ended(conversation, message, error);
  }

  // To be called after each chunk: draws once a frame, saves now and then.
  #painter(conversation, message) {
    let frame = null;
    let kept_ms = performance.now();
    return () => {
      frame ??= requestAnimationFrame(() => {
        frame = null;
        if (conversation === this.current) this.#events.streamed(message);
      });
      if (performance.now() - kept_ms < KEEP_EVERY_MS) return;
      kept_ms = performance.now();
      if (this.#store.get(conversation.id) === conversation) this.#store.save(conversation);
    };
  }

  #ended(conversation, message, error) {
    const answer = shown(message);
    const removed = this.#store.get(conversation.id) === undefined;
    if (!removed) this.#store.save(conversation);
    if (conversation === this.current) this.#events.streamed(message);
    this.#events.changed({ opened: false });
    if (error === null) {
      this.#events.said(`The answer is complete: ${statsLine(answer)}`);
      return;
    }
    this.#events.said(`${error.message} ${error.remedy ?? ""}`);
    const retry = () => {
      if (conversation === this.current) this.retry(conversation.messages.indexOf(message));
    };
    this.#events.refused(error, retry);
  }
}
