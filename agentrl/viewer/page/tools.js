// The page Tools: the tools that the model called, by name: calls, failures, time, and how these changed.

import { chart } from "./chart.js";
import { ask } from "./data.js";
import { add, duration, el, middle, number, percent, visible } from "./dom.js";

const DRAWN = 6;
const COLOURS = ["#3b82c4", "#dd8136", "#37a06f", "#b468c2", "#c2a029", "#4fb0b8"];
const COLUMNS = [["name", "tool", ""], ["calls", "calls", "number"], ["failed", "failed", "number"], ["share", "share failed", "number wide"], ["median", "median time", "number"], ["p99", "99 % within", "number wide"], ["seconds", "time in all", "number wide"], ["episodes", "episodes", "number wide"]];
const chosen = { by: "calls", up: false };

export async function showTools(room, context) {
  const { name: run, live } = context.chosen[0], place = context.place;
  const given = { first: place.get("first"), last: place.get("last"), evaluation: place.get("evaluation") };
  const found = await ask("tools", { run, ...given });
  if (!found.tools.length) {
    add(room, el("p", { class: "empty" }, found.unknown ? "These episodes were recorded by a release that did not keep calls." : live && !found.steps.length ? "No step is finished yet. Load this page again when one is." : "No tool was called: the environment has none, or the model never calls one."));
    return {};
  }
  const bound = (name, label) => el("label", {}, label, el("input", { type: "number", min: 0, value: given[name] ?? "", onchange: (event) => context.go("tools", { ...given, [name]: event.target.value }) }));
  const rows = found.tools.map((tool) => ({ ...tool, share: tool.failed / tool.calls }));
  const body = el("tbody", {}), head = el("tr", {});
  const drawn = found.tools.slice(0, DRAWN), plots = el("div", { class: "grid" });

  function fill() {
    const sign = chosen.up ? 1 : -1, order = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a ?? "").localeCompare(String(b ?? "")) : (a ?? -Infinity) - (b ?? -Infinity));
    body.replaceChildren(...rows.toSorted((a, b) => sign * order(a[chosen.by], b[chosen.by])).map((tool) => rowOf(tool, context, given)));
    head.replaceChildren(...COLUMNS.map(([column, title, kind]) => el("th", { class: kind, "aria-sort": chosen.by === column ? (chosen.up ? "ascending" : "descending") : null },
      el("button", { onclick: () => { chosen.up = chosen.by === column ? !chosen.up : column === "name"; chosen.by = column; fill(); } }, title, chosen.by === column ? (chosen.up ? " ↑" : " ↓") : ""))));
  }
  function draw() {
    const lines = (value) => drawn.map((tool, i) => ({ name: nameOf(tool.name), run, colour: COLOURS[i], points: tool.by_step.map(([step, calls, failed, seconds]) => [step, value(calls, failed, seconds)]).filter(([, y]) => y !== null) })).filter((one) => one.points.length);
    const figures = [["calls", (calls) => calls], ["share of calls that failed", (calls, failed) => failed / calls], ["mean time of a call, in seconds", (calls, failed, seconds) => (seconds === null ? null : seconds / calls)]];
    plots.replaceChildren(...figures.map(([title]) => el("section", { class: "panel chart" }, el("div", { class: "head" }, el("h3", {}, title), el("div", { class: "values" }, drawn.map((tool, i) => el("span", { title: nameOf(tool.name) }, el("i", { class: "dot", style: { background: COLOURS[i] } }), middle(nameOf(tool.name), 20))))), el("div", { class: "plot" }))));
    figures.forEach(([title, value], i) => chart(plots.children[i].querySelector(".plot"), lines(value), { smooth: 0, log: false, zoom: null, onzoom() {}, onpick: (step) => context.go("episodes", { step, evaluation: given.evaluation }), label: `${title} by step` }));
  }
  fill();
  const total = found.tools.reduce((sum, tool) => sum + tool.calls, 0), failed = found.tools.reduce((sum, tool) => sum + tool.failed, 0);
  add(room, el("h1", { class: "unseen" }, `Tools of ${run}`),
    el("p", { class: "lead" }, `${total.toLocaleString("en")} calls of ${found.tools.length.toLocaleString("en")} names, ${percent(failed / total)} of which failed, in the episodes of ${found.steps.length ? `steps ${found.steps[0]} to ${found.steps.at(-1)}` : "no step"}.`),
    el("div", { class: "bar" }, found.evaluations.length ? el("label", {}, "played for", el("select", { onchange: (event) => context.go("tools", { evaluation: event.target.value }) }, el("option", { value: "" }, "training"), found.evaluations.map((name) => el("option", { value: name, selected: name === given.evaluation }, name.replaceAll("_", " "))))) : null, bound("first", "from step"), bound("last", "to step")),
    el("div", { class: "panel table tools", tabindex: 0, role: "region", "aria-label": "tools" }, el("table", { "aria-label": "tools" }, el("thead", {}, head), body)),
    el("p", { class: "soft small" }, "A call failed if it could not be read, names no tool, has wrong arguments, or was answered by an error. Times are those of the environment, where it measures them; else the turn's time is shared by its calls."),
    plots);
  return { attached: draw, resized: draw };
}

const nameOf = (name) => (name === null ? "unreadable calls" : visible(name));

function rowOf(tool, context, given) {
  const to = (more) => context.address("episodes", { evaluation: given.evaluation, tool: tool.name, ...more });
  const known = tool.name !== null;
  return el("tr", {}, el("td", { class: known ? "mono" : "soft" }, known ? el("a", { class: "id", href: to({}), title: tool.name }, nameOf(tool.name)) : nameOf(null)),
    el("td", { class: "number" }, number(tool.calls)), el("td", { class: "number" }, known && tool.failed ? el("a", { href: to({ refused: "true" }) }, number(tool.failed)) : number(tool.failed)), el("td", { class: "number wide" }, percent(tool.share)),
    el("td", { class: "number" }, duration(tool.median)), el("td", { class: "number wide" }, duration(tool.p99)), el("td", { class: "number wide" }, duration(tool.seconds)), el("td", { class: "number wide" }, number(tool.episodes)));
}
