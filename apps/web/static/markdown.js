// Markdown as DOM nodes, for text that nobody has checked: no HTML is read or written.

import { parseBlocks } from "./blocks.js";
import { element } from "./dom.js";
import { inlineNodes } from "./inline.js";

/** Nodes for a whole text. */
export function renderMarkdown(text) {
  return parseBlocks(text.split("\n")).map(render);
}

/**
 * Renders a text that grows into `parent`, which is emptied first. What is shown is always what
 * `renderMarkdown` makes of the text so far, but only blocks that may still change are made anew.
 */
export class StreamingMarkdown {
  #parent;
  #offset = 0; // in the text: blocks before it cannot change any more
  #open = []; // nodes of the blocks after it

  constructor(parent) {
    this.#parent = parent;
    parent.replaceChildren();
  }

  /** `text` begins with all that was shown before. */
  show(text) {
    const lines = text.slice(this.#offset).split("\n");
    const blocks = parseBlocks(lines);
    for (const node of this.#open) node.remove();
    this.#open = blocks.map(render);
    this.#parent.append(...this.#open);
    // A block is settled when the one after it has begun with a whole line: the last line of the
    // text may still turn out to belong to the block before.
    let settled = 0;
    while (settled + 1 < blocks.length && blocks[settled + 1].start + 1 < lines.length - 1) {
      settled += 1;
    }
    if (settled === 0) return;
    const start = blocks[settled].start;
    this.#offset += lines.slice(0, start).reduce((sum, line) => sum + line.length + 1, 0);
    this.#open.splice(0, settled);
  }
}

const RENDERERS = {
  paragraph: ({ text }) => element("p", {}, ...inlineNodes(text)),
  heading: ({ level, text }) => heading(level, text),
  rule: () => element("hr"),
  code: codeBlock,
  quote: ({ blocks }) => element("blockquote", {}, ...blocks.map(render)),
  list: listNode,
  table: tableNode,
};

function render(block) {
  return RENDERERS[block.kind](block);
}

// One below the page's own headings, so that their order stays whole for who jumps between them.
function heading(level, text) {
  const tag = `h${Math.min(level + 2, 6)}`;
  return element(tag, { class: `level-${level}` }, ...inlineNodes(text));
}

function codeBlock({ language, text }) {
  const copy = element("button", { type: "button", class: "quiet", "data-copy": true }, "Copy");
  const caption = element("figcaption", {}, element("span", {}, language || "text"), copy);
  const pre = element("pre", { tabindex: "0" }, element("code", {}, text));
  return element("figure", { class: "code" }, caption, pre);
}

function listNode({ ordered, first, loose, items }) {
  const start = ordered && first !== 1 ? first : null;
  const nodes = items.map(({ blocks }) => element("li", {}, ...blocks.flatMap(itemNodes(loose))));
  return element(ordered ? "ol" : "ul", { start, class: loose ? "loose" : null }, ...nodes);
}

function itemNodes(loose) {
  return (block) =>
    block.kind === "paragraph" && !loose ? inlineNodes(task(block.text)) : [render(block)];
}

function task(text) {
  return text.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

function tableNode({ align, rows }) {
  const row = (tag) => (cells) =>
    element("tr", {}, ...cells.map((cell, i) => tableCell(tag, align[i], cell)));
  const [head, ...body] = rows;
  const table = element(
    "table",
    {},
    element("thead", {}, row("th")(head)),
    element("tbody", {}, ...body.map(row("td"))),
  );
  return element("div", { class: "wide", tabindex: "0" }, table);
}

function tableCell(tag, align, text) {
  return element(tag, { class: `align-${align}` }, ...inlineNodes(text));
}
