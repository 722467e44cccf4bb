// Elements, numbers and times. Whatever a run contains gets into the page as text nodes only.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "rect", "text", "circle"]);

/** An element; `on` + name are listeners, `style` is an object, other attributes are set as such. */
export function el(tag, attributes = {}, ...children) {
  const made = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else made.setAttribute(name, value === true ? "" : value);
  }
  return add(made, ...children);
}

/** Appends children; those that are nothing are left out. */
export function add(parent, ...children) {
  parent.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
}

// Characters that command a terminal, are not seen, or turn the order of what follows.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\u{e0000}-\u{e007f}]/gu;

/** A text of a run in which each character that would not be seen is written as its number. */
export const visible = (text) => String(text ?? "").replace(UNSEEN, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

/** A long name with its middle left out: names of runs often differ at their ends. */
export function middle(name, most = 36) {
  const letters = [...name];
  if (letters.length <= most) return name;
  const begin = Math.ceil((most - 1) / 2);
  return `${letters.slice(0, begin).join("")}…${letters.slice(letters.length - (most - 1 - begin)).join("")}`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 4 : digits)));
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(1e3 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${(1e3 * seconds).toFixed(0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** How long something goes on, in whole seconds, so that it counts calmly. */
export const lasting = (seconds) => (seconds < 90 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds));

const tip = document.getElementById("tip");

/** Shows rows of [name, value, colour] beside the pointer. */
export function showTip(event, title, rows = []) {
  tip.replaceChildren(
    ...(title ? [el("b", {}, title)] : []),
    ...rows.map(([name, value, colour]) =>
      el("div", {}, el("span", {}, colour ? el("i", { class: "dot", style: { background: colour } }) : null, name), el("span", {}, value))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

export function hideTip() { tip.hidden = true; }

export const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
