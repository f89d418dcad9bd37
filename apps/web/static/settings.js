// The panel of the system prompt, sampling and colours.

import { byId } from "./dom.js";

const DEFAULTS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", drafter: "auto" };

/** What is set, as strings; "" is the server's choice. Changes are kept at once. */
export class Settings {
  #store;
  #dialog = byId("settings");

  constructor(store) {
    this.#store = store;
    this.values = store.settings(DEFAULTS);
    const form = this.#dialog.querySelector("form");
    for (const name of ["system", "temperature", "top_p", "max_tokens", "seed"]) {
      const field = form.elements[name];
      field.value = this.values[name];
      // What is not valid stays on screen, marked by the browser, and is not used.
      field.addEventListener("input", () => field.checkValidity() && this.set(name, field.value));
    }
    const theme = form.elements.theme;
    theme.value = window.edgeSpecTheme.get();
    theme.addEventListener("change", () => window.edgeSpecTheme.set(theme.value));
    byId("show-settings").addEventListener("click", () => this.#dialog.showModal());
  }

  set(name, value) {
    this.values = { ...this.values, [name]: value };
    this.#store.saveSettings(this.values);
  }

  close() {
    this.#dialog.close();
  }
}
