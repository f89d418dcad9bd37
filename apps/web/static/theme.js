// Sets the colours before the first paint; a classic script, since modules run after it.
"use strict";

(() => {
  const KEY = "edge-spec.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      const kept = localStorage.getItem(KEY);
      return kept === "light" || kept === "dark" ? kept : "system";
    } catch {
      return "system"; // storage is off
    }
  }

  let choice = chosen();

  function apply() {
    const system = dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = choice === "system" ? system : choice;
  }

  dark.addEventListener("change", apply);
  apply();

  /** The colours chosen: "system", "light" or "dark". */
  window.edgeSpecTheme = {
    get: () => choice,
    set: (value) => {
      choice = value;
      apply();
      try {
        localStorage.setItem(KEY, value);
      } catch {
        // It holds until the page closes.
      }
    },
  };
})();
