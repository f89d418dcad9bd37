// The blocks of a Markdown text: what CommonMark calls so, and the tables of GitHub's dialect. HTML
// and indented code are paragraphs. Lines of a list item may be indented by two spaces whatever its
// marker is, as models write them.

const MAX_DEPTH = 12; // of lists and quotes in each other: deeper is a paragraph
const MAX_COLUMNS = 64;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-+*]|\d{1,9}[.)])(?:([ \t]+)(.*)|)$/;
const UNDERLINE = /^ {0,3}(={3,}|-{3,})[ \t]*$/; // shorter would flash while a list begins

/**
 * Blocks of these lines, each {kind, start, end} (lines, end excluded) and:
 * paragraph {text}; heading {level, text}; code {language, text}; rule; quote {blocks};
 * list {ordered, first, loose, items: [{blocks}]}; table {align, rows: [[cell]]}, the header first.
 */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at, depth);
    blocks.push({ ...block, start: at });
    at = block.end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (heading !== null) {
    const text = withoutClosing(heading[2] ?? "");
    return { kind: "heading", level: heading[1].length, text, end: at + 1 };
  }
  if (FENCE.test(line)) return code(lines, at);
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  return table(lines, at) ?? paragraph(lines, at);
}

function withoutClosing(text) {
  const bare = text.trim();
  let end = bare.length;
  while (bare[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(bare[end - 1]) ? bare.slice(0, end).trimEnd() : bare;
}

function code(lines, at) {
  const [, indent, marks, info] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const outdent = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(outdent, ""));
  const language = info.trim().split(/\s/)[0];
  return { kind: "code", language, text: text.join("\n"), end: Math.min(end + 1, lines.length) };
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines, at, end))) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { kind: "quote", blocks: parseBlocks(inside, depth + 1), end };
}

function list(lines, at, depth) {
  const [, , marker] = ITEM.exec(lines[at]);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (found === null || !sameList(found[2], marker) || RULE.test(lines[end])) break;
    const item = listItem(lines, end, found);
    items.push({ blocks: parseBlocks(item.lines, depth + 1) });
    end = item.end;
    let next = end;
    while (next < lines.length && lines[next].trim() === "") next += 1;
    const more = next < lines.length && sameList(ITEM.exec(lines[next])?.[2], marker);
    loose ||= item.spaced || (more && next > end);
    if (more) end = next;
  }
  const ordered = marker.length > 1;
  return { kind: "list", ordered, first: ordered ? parseInt(marker, 10) : 1, loose, items, end };
}

function sameList(marker, first) {
  return marker !== undefined && marker.at(-1) === first.at(-1);
}

// The lines of one item without their indent, and whether a blank line parts its own paragraphs.
function listItem(lines, at, [, indent, marker, space, text]) {
  const width = indent.length + marker.length;
  const content = width + (space === undefined || space.length > 4 ? 1 : space.length);
  const outdent = new RegExp(`^ {0,${content}}`);
  const inside = [(text ?? "").replace(/\t/g, "    ")];
  let end = at + 1;
  let spaced = false;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next].replace(/\t/g, "    ");
    if (line.trim() === "") continue;
    const indented = line.search(/\S/) - indent.length >= 2;
    if (!indented && (next > end || !continues(lines, at, next))) break;
    while (end < next) {
      inside.push("");
      end += 1;
      spaced ||= !ITEM.test(line.replace(outdent, ""));
    }
    inside.push(line.replace(outdent, ""));
    end += 1;
  }
  return { lines: inside, end, spaced };
}

// Whether a line goes on with the paragraph before it although its quote's or item's sign is gone.
function continues(lines, start, at) {
  if (at === start || lines[at].trim() === "" || lines[at - 1].trim() === "") return false;
  const before = lines[at - 1].replace(QUOTE, "");
  return !startsBlock(lines[at]) && !FENCE.test(before) && !HEADING.test(before);
}

function startsBlock(line) {
  return [HEADING, FENCE, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "") {
    const underline = UNDERLINE.exec(lines[end]);
    if (underline !== null) {
      const level = underline[1][0] === "=" ? 1 : 2;
      return { kind: "heading", level, text: joined(lines.slice(at, end)), end: end + 1 };
    }
    if (startsBlock(lines[end]) && interrupts(lines[end])) break;
    if (columns(lines, end) > 0) break;
    end += 1;
  }
  return { kind: "paragraph", text: joined(lines.slice(at, end)), end };
}

// A number that begins a line within a paragraph is a list only where it is 1, as in CommonMark.
function interrupts(line) {
  const item = ITEM.exec(line);
  return item === null || (item[4] !== undefined && !/^\d/.test(item[2])) || /^1[.)]/.test(item[2]);
}

function joined(lines) {
  return lines.map((line) => line.replace(/^[ \t]+/, "")).join("\n").trimEnd();
}

function table(lines, at) {
  const count = columns(lines, at);
  if (count === 0) return null;
  const align = cells(lines[at + 1]).map(alignment);
  const rows = [cells(lines[at])];
  let end = at + 2;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines[end])) {
    const row = cells(lines[end]).slice(0, count);
    rows.push([...row, ...Array(count - row.length).fill("")]);
    end += 1;
  }
  return { kind: "table", align, rows, end };
}

// Of the table that begins at this line; 0 where none does.
function columns(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !/^[ \t|:-]+$/.test(below)) return 0;
  const marks = cells(below);
  const fits = marks.length === cells(lines[at]).length && marks.length <= MAX_COLUMNS;
  return fits && marks.every((mark) => /^:?-+:?$/.test(mark)) ? marks.length : 0;
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(mark) {
  if (!mark.endsWith(":")) return "start";
  return mark.startsWith(":") ? "center" : "end";
}
