// The page Config: each setting with where it came from, and what differs between runs.

import { ask } from "./data.js";
import { add, el, middle, visible } from "./dom.js";

const chosen = { filter: "", set: false, differing: true };

export async function showConfig(room, context) {
  const runs = context.chosen, several = runs.length > 1, number = several ? null : context.place.get("number");
  const found = await Promise.all(runs.map((run) => ask("config", { run: run.name, number })));
  const names = [...new Set(found.flatMap(({ settings }) => Object.keys(settings)))];
  const body = el("tbody", {});
  const text = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const differs = (name) => new Set(found.map(({ settings }) => text(settings[name]))).size > 1;
  const isSet = (name) => found.some(({ origins }) => (origins[name] || "default") !== "default");

  function fill() {
    const shown = names.filter((name) => name.toLowerCase().includes(chosen.filter) && (!chosen.set || isSet(name)) && (!several || !chosen.differing || differs(name)));
    body.replaceChildren(...shown.map((name) => el("tr", { class: several && differs(name) ? "differs" : "" }, el("td", { class: "mono" }, name.split(/(?<=\.)/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]))),
      found.map(({ settings, origins }) => [el("td", { class: "mono" }, text(settings[name])), el("td", { class: "soft small" }, origins[name] || "")]))));
    if (!shown.length) body.append(el("tr", {}, el("td", { colspan: 1 + 2 * runs.length, class: "empty" }, several && chosen.differing ? "These runs have the same settings." : "No setting is like this.")));
  }
  const toggle = (label, name) => {
    const made = el("button", { "aria-pressed": String(chosen[name]), onclick: () => { chosen[name] = !chosen[name]; made.setAttribute("aria-pressed", String(chosen[name])); fill(); } }, label);
    return made;
  };
  const search = el("input", { type: "search", placeholder: "setting …  /", value: chosen.filter, "aria-label": "settings whose name contains", oninput: (event) => { chosen.filter = event.target.value.toLowerCase(); fill(); } });
  add(room, several ? null : historyOf(found[0].changes, number, context, text), el("div", { class: "bar" }, search, toggle("only what was set", "set"), several ? toggle("only differences", "differing") : null, several ? null : el("span", { class: "soft small" }, "Choose a second run above to compare.")),
    el("div", { class: "panel table settings" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((run) => [el("th", { title: run.name }, middle(run.name)), el("th", {}, "from")]))), body)));
  fill();
  return { key(key) { if (key !== "/") return false; search.focus(); return true; } };
}

/** The configs that a run has had, each with what it changed; nothing if there was only one. */
function historyOf(changes, number, context, text) {
  if (changes.length < 2) return null;
  const newest = String(changes.at(-1).config);
  return el("section", { class: "panel history", "aria-label": "configs of this run" }, el("h3", {}, `This run has had ${changes.length} configs`), el("ul", {}, changes.map((one) => {
    const name = String(one.config), now = (number ?? newest) === name;
    const made = Object.entries(one.changed).map(([key, pair]) => el("div", { class: "mono" }, visible(`${key}: ${text(pair?.[0])} → ${text(pair?.[1])}`)));
    return el("li", {}, el("a", { href: context.address("config", { number: name === newest ? "" : name }), "aria-current": now ? "true" : null }, `config ${name}`), ` from step ${one.step} on, ${new Date(one.at).toLocaleString("sv-SE").slice(0, 16)}${now ? ", shown below" : ""}`, made);
  })));
}
