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
 * `renderMarkdown` makes of the text so far, but only blocks that may still change are made again.
 */
export class StreamingMarkdown {
  #parent;
  #offset = 0; // in the text: blocks before it cannot change any more
  #open = []; // {block, node} of the blocks after it

  constructor(parent) {
    this.#parent = parent;
    parent.replaceChildren();
  }

  /** `text` begins with all that was shown before. */
  show(text) {
    const lines = text.slice(this.#offset).split("\n");
    const blocks = parseBlocks(lines);
    const before = this.#open;
    this.#open = blocks.map((block, i) => {
      const node = grown(before[i], block) ?? render(block);
      if (before[i] === undefined) this.#parent.append(node);
      else if (before[i].node !== node) before[i].node.replaceWith(node);
      return { block, node };
    });
    for (const { node } of before.slice(blocks.length)) node.remove();
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

// Blocks that may get long while they are open: their parts are kept as long as they stay the same.
const GROWING = {
  list: {
    frame: ({ ordered, first, loose }) => [ordered, first, loose],
    parts: ({ items }) => items,
    parent: (node) => node,
    make: (item, { loose }) => itemNode(item, loose),
  },
  table: {
    frame: ({ align, rows }) => [align, rows[0]],
    parts: ({ rows }) => rows.slice(1),
    parent: (node) => node.querySelector("tbody"),
    make: (row, { align }) => rowNode("td", row, align),
  },
};

// The node of what was shown before, made to show `block`; null where that is another thing.
function grown(shown, block) {
  const kind = GROWING[block.kind];
  if (kind === undefined || shown?.block.kind !== block.kind) return null;
  if (!same(kind.frame(shown.block), kind.frame(block))) return null;
  const [old, parts] = [kind.parts(shown.block), kind.parts(block)];
  let kept = 0;
  while (kept < Math.min(old.length, parts.length) && same(old[kept], parts[kept])) kept += 1;
  const parent = kind.parent(shown.node);
  while (parent.children.length > kept) parent.lastChild.remove();
  parent.append(...parts.slice(kept).map((part) => kind.make(part, block)));
  return shown.node;
}

function same(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
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

/** A block of code, with a button that copies it. */
export function codeBlock({ language, text }) {
  const copy = element("button", { type: "button", class: "quiet", "data-copy": true }, "Copy");
  const caption = element("figcaption", {}, element("span", {}, language || "text"), copy);
  const pre = element("pre", { tabindex: "0" }, element("code", {}, text));
  return element("figure", { class: "code" }, caption, pre);
}

function listNode({ ordered, first, loose, items }) {
  const start = ordered && first !== 1 ? first : null;
  const nodes = items.map((item) => itemNode(item, loose));
  return element(ordered ? "ol" : "ul", { start, class: loose ? "loose" : null }, ...nodes);
}

function itemNode({ blocks }, loose) {
  const nodes = blocks.flatMap((block) =>
    block.kind === "paragraph" && !loose ? inlineNodes(task(block.text)) : [render(block)],
  );
  return element("li", {}, ...nodes);
}

function task(text) {
  return text.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

function tableNode({ align, rows }) {
  const [head, ...body] = rows;
  const table = element(
    "table",
    {},
    element("thead", {}, rowNode("th", head, align)),
    element("tbody", {}, ...body.map((row) => rowNode("td", row, align))),
  );
  return element("div", { class: "wide", tabindex: "0" }, table);
}

function rowNode(tag, cells, align) {
  const nodes = cells.map((cell, i) =>
    element(tag, { class: `align-${align[i]}` }, ...inlineNodes(cell)),
  );
  return element("tr", {}, ...nodes);
}
