// Conversations and settings in this browser's localStorage, each under its own key, so that two
// tabs do not overwrite each other's. What is damaged is passed over; where nothing can be written,
// everything holds until the page closes.

import { cleanConversation } from "./conversation.js";

const CONVERSATION = "edge-spec.conversation.";
const SETTINGS = "edge-spec.settings";

export class Store {
  #conversations = new Map();
  #onFull;
  #onOther;

  /** onFull() is called where something could not be kept, onOther(id) when another tab changed or
   * deleted a conversation. */
  constructor(onFull, onOther) {
    this.#onFull = onFull;
    this.#onOther = onOther;
    for (const key of keys()) this.#read(key);
    addEventListener("storage", (event) => this.#changed(event.key));
  }

  /** All conversations, the latest first. */
  all() {
    return [...this.#conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#conversations.get(id);
  }

  save(conversation) {
    this.#conversations.set(conversation.id, conversation);
    this.#write(CONVERSATION + conversation.id, conversation);
  }

  remove(id) {
    this.#conversations.delete(id);
    try {
      localStorage.removeItem(CONVERSATION + id);
    } catch {
      // Storage is off: there is nothing to remove.
    }
  }

  /** Saved settings over `defaults`: of each, only a value of the default's type is taken. */
  settings(defaults) {
    const kept = parsed(SETTINGS) ?? {};
    const fits = ([name, value]) => typeof kept[name] === typeof value;
    return { ...defaults, ...Object.fromEntries(Object.entries(defaults).filter(fits).map(([name]) => [name, kept[name]])) };
  }

  saveSettings(settings) {
    this.#write(SETTINGS, settings);
  }

  #write(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch {
      this.#onFull(); // full, or switched off
    }
  }

  #read(key) {
    const conversation = cleanConversation(parsed(key));
    if (conversation !== null && key === CONVERSATION + conversation.id) {
      this.#conversations.set(conversation.id, conversation);
    }
  }

  #changed(key) {
    if (!key?.startsWith(CONVERSATION)) return;
    this.#conversations.delete(key.slice(CONVERSATION.length));
    this.#read(key);
    this.#onOther(key.slice(CONVERSATION.length));
  }
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(CONVERSATION));
  } catch {
    return [];
  }
}

function parsed(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}
