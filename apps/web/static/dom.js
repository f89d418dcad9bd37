// Elements without HTML strings: whatever text comes in stays text.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with attributes and children; strings become text nodes, null and false nothing.
 * Attributes: `class`, `on` ({event: handler}), any other by its name; null and false leave it out.
 */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `element`, for drawings. */
export function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A symbol of index.html; decoration beside a text or an aria-label. */
export function icon(name) {
  const use = drawing("use", { href: `#icon-${name}` });
  return drawing("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/** A button with a picture, whose name is read aloud and shown on hover. */
export function iconButton(name, label, onClick) {
  const attributes = { type: "button", class: "quiet", "aria-label": label, title: label };
  return element("button", { ...attributes, on: { click: onClick } }, icon(name));
}

export function byId(id) {
  return document.getElementById(id);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}
