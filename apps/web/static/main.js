// Puts the page together: what is clicked and typed, and what follows from it.

import { ServerError, fetchInfo, fetchModels, fetchPlan, setKey, takeKeyFromAddress } from "./api.js";
import { Chats } from "./chats.js";
import { byId, element, iconButton } from "./dom.js";
import { planNodes } from "./plan.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { SpeedPanel } from "./speed.js";
import { Store } from "./store.js";
import { Thread } from "./thread.js";

const question = byId("question");
const drafter = byId("drafter");
const choice = byId("choice");
const store = new Store(storageFull, otherTab);
const settings = new Settings(store);
const speedCovers = matchMedia("(max-width: 1080px)"); // as in page.css
let afterKey = null; // what to try again once there is a key

const thread = new Thread(byId("scroller"), byId("thread"), byId("to-end"), {
  edit: (index, text) => chats.edit(index, text),
  regenerate: (index) => {
    question.focus(); // the button goes away
    chats.regenerate(index);
  },
  retry: (index) => {
    question.focus();
    chats.retry(index);
  },
  choose: (index, step) => chats.choose(index, step),
  copy,
});
const sidebar = new Sidebar(byId("conversations"), {
  open: (id) => {
    chats.open(id);
    closeSidebar();
  },
  rename: (id, title) => chats.rename(id, title),
  remove,
});
const speed = new SpeedPanel(byId("rates"));
const chats = new Chats(store, settings, { changed, streamed, said: say, refused });

// What the panels show follows from the chats.
function changed({ opened }) {
  const { current } = chats;
  if (opened) thread.show(current);
  sidebar.show(store.all(), current.id, chats.running);
  byId("title").textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} · edge-spec` : "edge-spec";
  byId("welcome").hidden = current.messages.length > 0;
  const running = chats.running.has(current.id);
  for (const id of ["stop", "stop-keys"]) byId(id).hidden = !running;
  for (const id of ["send", "send-keys"]) byId(id).hidden = running;
  speed.update(current);
}

function streamed(message) {
  thread.update(message);
  speed.update(chats.current);
}

function say(text) {
  byId("status").textContent = text;
}

function refused(error, retry) {
  if (error.status !== 401) return;
  afterKey = retry;
  byId("key").returnValue = "";
  if (!byId("key").open) byId("key").showModal();
}

function keyEntered() {
  const field = byId("key").querySelector("input");
  const key = field.value;
  field.value = "";
  if (byId("key").returnValue === "use") {
    setKey(key);
    afterKey();
  } else {
    const enter = () => byId("key").showModal();
    notify("Without its key the server answers nothing.", "Enter it", enter);
  }
}

function notify(text, label = null, action = null) {
  const notice = byId("notice");
  const hide = () => (notice.hidden = true);
  const close = iconButton("close", "Close", hide);
  const act = () => {
    hide();
    action();
  };
  const button = label && element("button", { type: "button", on: { click: act } }, label);
  notice.replaceChildren(element("span", {}, text), ...[button, close].filter(Boolean));
  notice.hidden = false;
}

function storageFull() {
  const what = "This browser's storage is full or switched off";
  notify(`${what}: what is new is lost with the page. Deleting conversations makes room.`);
}

function otherTab(id) {
  if (id === chats.current.id && !chats.running.has(id)) chats.open(id);
  else changed({ opened: false });
}

function remove(id) {
  const conversation = store.get(id);
  chats.remove(id);
  question.focus();
  notify(`Deleted “${conversation.title}”.`, "Undo", () => chats.restore(conversation));
}

async function connect() {
  try {
    const [names, first] = await Promise.all([fetchModels(), fetchInfo()]);
    const kept = settings.values.model;
    chats.model = names.includes(kept) ? kept : first.model;
    listModels(names);
    if (chats.model === first.model) showInfo(first);
    else await openModel();
    byId("notice").hidden = true;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    refused(error, connect);
    if (error.status !== 401) notify(`${error.message} ${error.remedy}`, "Try again", connect);
  }
}

function listModels(names) {
  choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  choice.value = chats.model;
  byId("models").hidden = names.length < 2;
}

// Has the server open the model that is chosen, which may take a while.
async function openModel() {
  const { model } = chats;
  byId("model").textContent = `Opening ${model}…`;
  try {
    const info = await fetchInfo(model);
    if (chats.model === model) showInfo(info);
  } catch (error) {
    if (chats.model === model) byId("model").textContent = `${model} is not open`;
    throw error;
  }
}

function showInfo(info) {
  const context = info.context_length.toLocaleString("en");
  byId("model").textContent = `${info.model} on ${info.runtime}, ${context} tokens`;
  listDrafters(info.drafters ?? []);
  settings.makersSampling(info.model);
}

async function chooseModel() {
  chats.model = choice.value;
  settings.set("model", choice.value);
  try {
    await openModel();
    byId("notice").hidden = true;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    refused(error, chooseModel);
    if (error.status !== 401) notify(`${error.message} ${error.remedy}`, "Try again", chooseModel);
  }
}

function listDrafters(names) {
  const [auto, off] = drafter.options;
  const others = names.filter((name) => name !== auto.value && name !== off.value);
  const added = others.map((name) => element("option", { value: name }, name));
  drafter.replaceChildren(auto, off, ...added);
  drafter.value = settings.values.drafter;
  if (drafter.selectedIndex === -1) drafter.value = "auto"; // it is not installed any more
}

async function showPlan() {
  const content = byId("plan-content");
  content.replaceChildren(element("p", { class: "note" }, "Asking the server…"));
  byId("plan").showModal();
  try {
    content.replaceChildren(...planNodes(await fetchPlan(chats.model)));
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    content.replaceChildren(element("p", {}, `${error.message} ${error.remedy}`));
    if (error.status === 401) byId("plan").close();
    refused(error, showPlan);
  }
}

function send() {
  const text = question.value;
  if (text.trim() === "" || chats.running.has(chats.current.id)) return;
  question.value = "";
  fitQuestion();
  chats.send(text);
}

// As high as its text, up to the limit of the style sheet.
function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function openSidebar() {
  document.body.classList.add("drawer");
  document.querySelector("main").inert = true;
  byId("open-sidebar").setAttribute("aria-expanded", "true");
  byId("close-sidebar").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("drawer")) return;
  document.body.classList.remove("drawer");
  document.querySelector("main").inert = false;
  byId("open-sidebar").setAttribute("aria-expanded", "false");
  byId("open-sidebar").focus();
}

function newChat() {
  chats.open(null);
  closeSidebar();
  question.focus();
}

function showSpeed(visible) {
  byId("speed").hidden = !visible;
  byId("show-speed").setAttribute("aria-pressed", String(visible));
}

function toggleTokens({ currentTarget: button }) {
  const tokens = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(tokens));
  thread.tokens = tokens;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  } catch {
    notify("The browser does not let the page copy. Select the text and copy it yourself.");
  }
}

function pressed(event) {
  if (event.key === "Escape" && !event.defaultPrevented) {
    if (document.body.classList.contains("drawer")) closeSidebar();
    else if (dialogOpen()) return; // it closes
    else if (chats.running.has(chats.current.id)) chats.stop();
    else if (speedCovers.matches) showSpeed(false);
  } else if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!dialogOpen()) newChat();
  }
}

function dialogOpen() {
  return document.querySelector("dialog[open]") !== null;
}

function listen() {
  const click = (id, action) => byId(id).addEventListener("click", action);
  click("new", newChat);
  click("open-sidebar", openSidebar);
  click("close-sidebar", closeSidebar);
  click("show-tokens", toggleTokens);
  click("show-speed", () => showSpeed(byId("speed").hidden));
  click("close-speed", () => showSpeed(false));
  click("show-plan", showPlan);
  click("stop", () => chats.stop());
  click("thread", ({ target }) => {
    const button = target.closest("[data-copy]");
    if (button !== null) copy(button.closest("figure").querySelector("pre").textContent, button);
  });
  click("forget", () => {
    settings.close();
    const all = store.all();
    for (const { id } of all) chats.remove(id);
    const undo = () => all.forEach((conversation) => chats.restore(conversation));
    notify(`Deleted ${all.length} conversations.`, "Undo", undo);
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("input", fitQuestion);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  choice.addEventListener("change", chooseModel);
  drafter.addEventListener("change", () => settings.set("drafter", drafter.value));
  byId("key").addEventListener("close", keyEntered);
  document.addEventListener("keydown", pressed);
  document.addEventListener("click", ({ target }) => target === document.body && closeSidebar());
  addEventListener("pagehide", () => chats.keep());
  addEventListener("pageshow", ({ persisted }) => persisted && location.reload()); // from "back"
}

takeKeyFromAddress();
listen();
chats.open(store.all()[0]?.id ?? null);
connect();
