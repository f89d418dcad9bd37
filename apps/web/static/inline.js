// Markdown inside a paragraph: code, emphasis, links, breaks. Text becomes text nodes and nothing
// else; only http and https addresses become links. Emphasis follows CommonMark 0.31, section 6.2.

import { element } from "./dom.js";

// Emphasis in emphasis, and signs in a row, beyond these are left as text.
const MAX_DEPTH = 24;
const MAX_RUN = 12;
const SPECIAL = /[\\`*_~[\]!<\n]|https?:\/\//g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SPACE = /^\s$/;
const PUNCTUATION = /^[\p{P}\p{S}]$/u;
const BARE_ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ANGLE_ADDRESS = /<(https?:\/\/[^\s<>]+)>/y;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]{0,300}"|'[^']{0,300}'))?\s*\)/y;

/** The address as a URL where it is http or https, else null. */
export function safeAddress(text) {
  try {
    const url = new URL(text); // relative ones have no place in an answer
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** Nodes for the Markdown of one paragraph, heading or table cell. */
export function inlineNodes(text) {
  return build(joinEmphasis(scan(text)));
}

// Pieces: {text}, {node} or {mark, count, opens, closes}.
function scan(text) {
  const pieces = [];
  const brackets = []; // indices into pieces of "[" that may still become links
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (found === null) {
      pieces.push({ text: text.slice(at) });
      break;
    }
    if (found.index > at) pieces.push({ text: text.slice(at, found.index) });
    at = found.index;
    const sign = text[at];
    if (sign === "\\") at = escaped(text, at, pieces);
    else if (sign === "`") at = codeSpan(text, at, pieces);
    else if (sign === "\n") at = lineBreak(text, at, pieces);
    else if (sign === "*" || sign === "_" || sign === "~") at = delimiter(text, at, pieces);
    else if (sign === "<" || sign === "h") at = address(text, at, sign, pieces);
    else if (sign === "]") at = closeBracket(text, at, pieces, brackets);
    else at = openBracket(text, at, pieces, brackets);
  }
  return pieces;
}

function escaped(text, at, pieces) {
  const next = text[at + 1];
  if (next === "\n") {
    pieces.push({ node: element("br") });
    return at + 2;
  }
  const escapes = next !== undefined && ESCAPABLE.test(next);
  pieces.push({ text: escapes ? next : "\\" });
  return at + (escapes ? 2 : 1);
}

function codeSpan(text, at, pieces) {
  const fence = /`+/y;
  fence.lastIndex = at;
  const marks = fence.exec(text)[0];
  let end = text.indexOf(marks, at + marks.length);
  while (end !== -1 && (text[end + marks.length] === "`" || text[end - 1] === "`")) {
    end = text.indexOf(marks, end + 1);
  }
  if (end === -1) {
    pieces.push({ text: marks });
    return at + marks.length;
  }
  let code = text.slice(at + marks.length, end).replaceAll("\n", " ");
  if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
  pieces.push({ node: element("code", {}, code) });
  return end + marks.length;
}

function lineBreak(text, at, pieces) {
  const last = pieces.at(-1);
  const hard = last?.text?.endsWith("  ");
  if (last?.text !== undefined) last.text = last.text.trimEnd();
  pieces.push(hard ? { node: element("br") } : { text: "\n" });
  return at + 1;
}

function delimiter(text, at, pieces) {
  const mark = text[at];
  let end = at;
  while (text[end] === mark) end += 1;
  const count = end - at;
  const before = at === 0 ? " " : text[at - 1];
  const after = end === text.length ? " " : text[end];
  const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
  const [signBefore, signAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!signAfter || spaceBefore || signBefore);
  const right = !spaceBefore && (!signBefore || spaceAfter || signAfter);
  const opens = mark === "_" ? left && (!right || signBefore) : left;
  const closes = mark === "_" ? right && (!left || signAfter) : right;
  if (count > MAX_RUN || (mark === "~" && count !== 2)) pieces.push({ text: mark.repeat(count) });
  else pieces.push({ mark, count, opens, closes });
  return end;
}

function address(text, at, sign, pieces) {
  const pattern = sign === "<" ? ANGLE_ADDRESS : BARE_ADDRESS;
  pattern.lastIndex = at;
  const found = pattern.exec(text);
  if (found === null) {
    pieces.push({ text: sign });
    return at + 1;
  }
  let shown = found[1] ?? found[0];
  let length = found[0].length;
  if (sign !== "<") {
    shown = shown.replace(/[.,;:!?*_~'"\]]+$/, ""); // the sentence's, not the address's
    if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
    length = shown.length;
  }
  pieces.push(linked(shown, [document.createTextNode(shown)]));
  return at + length;
}

function openBracket(text, at, pieces, brackets) {
  const picture = text.startsWith("![", at);
  if (picture || text[at] === "[") brackets.push(pieces.length);
  pieces.push({ text: picture ? "![" : text[at] });
  return at + (picture ? 2 : 1);
}

function closeBracket(text, at, pieces, brackets) {
  const start = brackets.pop();
  TARGET.lastIndex = at + 1;
  const target = start === undefined ? null : TARGET.exec(text);
  if (target === null) {
    pieces.push({ text: "]" });
    return at + 1;
  }
  const inside = pieces.splice(start).slice(1);
  const written = (target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  // Pictures are not loaded: an address asked for by a model would tell others what was said.
  pieces.push(linked(written, build(joinEmphasis(inside.map(unlinked)))));
  brackets.length = 0; // no link inside a link
  return TARGET.lastIndex;
}

function linked(written, children) {
  const href = safeAddress(written);
  if (href === null) return { node: element("span", {}, ...children) };
  const attributes = { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href };
  return { node: element("a", attributes, ...children) };
}

function unlinked(piece) {
  return piece.node?.tagName === "A" ? { text: piece.node.textContent } : piece;
}

// Pairs delimiters and wraps what is between them, innermost first.
function joinEmphasis(pieces) {
  const done = [];
  const openers = []; // indices into `done`
  for (const piece of pieces) {
    if (piece.mark === undefined) {
      done.push(piece);
      continue;
    }
    const rest = { ...piece };
    if (rest.closes) closeEmphasis(rest, done, openers);
    if (rest.count === 0) continue;
    if (rest.opens) openers.push(done.length);
    if (openers.length > MAX_DEPTH) openers.shift();
    done.push(rest);
  }
  return done;
}

function closeEmphasis(closer, done, openers) {
  for (let i = openers.length - 1; i >= 0 && closer.count > 0; i -= 1) {
    const opener = done[openers[i]];
    if (opener.mark !== closer.mark || !fitTogether(opener, closer)) continue;
    const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
    const tag = closer.mark === "~" ? "del" : used === 2 ? "strong" : "em";
    openers.length = i + 1; // those in between stay text
    const inside = build(done.splice(openers[i] + 1));
    done.push({ node: element(tag, {}, ...inside) });
    opener.count -= used;
    closer.count -= used;
    if (opener.count === 0) {
      done.splice(openers[i], 1);
      openers.length = i;
    } else {
      i += 1; // the same opener may close once more
    }
  }
}

function fitTogether(opener, closer) {
  if (!opener.closes && !closer.opens) return true;
  const sum = opener.count + closer.count;
  return sum % 3 !== 0 || (opener.count % 3 === 0 && closer.count % 3 === 0);
}

function build(pieces) {
  const nodes = [];
  let text = "";
  const flush = () => {
    if (text !== "") nodes.push(document.createTextNode(text));
    text = "";
  };
  for (const piece of pieces) {
    if (piece.node === undefined) {
      text += piece.text ?? piece.mark.repeat(piece.count);
      continue;
    }
    flush();
    nodes.push(piece.node);
  }
  flush();
  return nodes;
}
