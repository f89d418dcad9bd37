// The list of conversations: open, rename, delete; by keyboard with arrows, F2 and Delete.

import { element, iconButton } from "./dom.js";

export class Sidebar {
  #list;
  #actions;

  /** `actions`: open(id), rename(id, title), remove(id). */
  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
    list.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Draws the list; `running` holds the ids of conversations that an answer is written for. */
  show(conversations, current, running) {
    const focused = document.activeElement?.closest("li")?.dataset.id;
    const items = conversations.map((conversation, i) => {
      const { id, title } = conversation;
      const isCurrent = id === current;
      const open = element(
        "button",
        {
          type: "button",
          class: "open",
          "aria-current": isCurrent ? "true" : null,
          tabindex: isCurrent || (i === 0 && !conversations.some((other) => other.id === current)) ? "0" : "-1",
          on: { click: () => this.#actions.open(id) },
        },
        title || "New chat",
      );
      if (running.has(id)) open.append(element("span", { class: "busy" }, " (answering)"));
      const rename = iconButton("edit", `Rename ${title}`, () => this.#rename(id, title));
      const remove = iconButton("delete", `Delete ${title}`, () => this.#actions.remove(id));
      for (const button of [rename, remove]) button.tabIndex = isCurrent ? 0 : -1;
      return element("li", { "data-id": id }, open, rename, remove);
    });
    const inside = this.#list.contains(document.activeElement);
    this.#list.replaceChildren(...items);
    if (inside) (this.#item(focused) ?? items[0])?.querySelector(".open").focus();
  }

  #item(id) {
    return [...this.#list.children].find((item) => item.dataset.id === id);
  }

  #rename(id, title) {
    const input = element("input", { "aria-label": "Title", maxlength: 200 });
    input.value = title;
    const item = this.#item(id);
    item.replaceChildren(input);
    input.select();
    const finish = (event) => {
      if (event.type === "keydown" && !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      input.removeEventListener("blur", finish);
      const named = event.key !== "Escape" && input.value.trim() !== "";
      this.#actions.rename(id, named ? input.value.trim() : title);
    };
    input.addEventListener("keydown", finish);
    input.addEventListener("blur", finish);
  }

  #key(event) {
    const item = event.target.closest("li");
    if (!event.target.classList.contains("open")) return;
    const items = [...this.#list.children];
    const at = items.indexOf(item);
    const goals = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
    if (event.key in goals) {
      items[goals[event.key]]?.querySelector(".open").focus();
    } else if (event.key === "F2") {
      this.#rename(item.dataset.id, item.querySelector(".open").firstChild.data);
    } else if (event.key === "Delete") {
      this.#actions.remove(item.dataset.id);
    } else {
      return;
    }
    event.preventDefault();
  }
}
