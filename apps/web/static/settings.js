// The panel of the system prompt, sampling and colours.

import { ServerError, fetchProps } from "./api.js";
import { byId } from "./dom.js";

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "reasoning_budget", "seed"];
const SAMPLING = {
  // the names of /props, and those of requests
  temperature: "temperature",
  top_k: "top_k",
  top_p: "top_p",
  min_p: "min_p",
  repeat_penalty: "repetition_penalty",
};
const DEFAULTS = {
  ...Object.fromEntries(FIELDS.map((name) => [name, ""])),
  drafter: "auto",
  model: "", // the server's choice
};

/** What is set, as strings; "" is the server's choice. Changes are kept at once. */
export class Settings {
  #store;
  #dialog = byId("settings");
  #props = new Map(); // model: as the server told them

  constructor(store) {
    this.#store = store;
    this.values = store.settings(DEFAULTS);
    const form = this.#dialog.querySelector("form");
    for (const name of FIELDS) {
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

  /** How the model's makers mean its answers to be drawn, in the names of requests, where that is
   * not what requests get anyway. The panel shows it from then on. Nothing where the server does
   * not tell: the question fails, too. */
  async makersSampling(model) {
    try {
      if (!this.#props.has(model)) this.#props.set(model, await fetchProps(model));
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      return {};
    }
    const props = this.#props.get(model);
    const { params } = props.default_generation_settings;
    const { sampling, sampling_source, request_params } = props.edge_spec;
    const { elements } = this.#dialog.querySelector("form");
    elements.temperature.placeholder = params.temperature;
    elements.top_p.placeholder = params.top_p;
    byId("makers").textContent = `Where nothing is set: ${sampling} (${sampling_source}).`;
    const others = Object.keys(SAMPLING).filter((name) => params[name] !== request_params[name]);
    return Object.fromEntries(others.map((name) => [SAMPLING[name], params[name]]));
  }

  set(name, value) {
    this.values = { ...this.values, [name]: value };
    this.#store.saveSettings(this.values);
  }

  close() {
    this.#dialog.close();
  }
}
