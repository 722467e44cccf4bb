// Which page is shown, of which runs; the keys; what arrives while runs go on.

import { el, hideTip, middle } from "./dom.js";
import { ask, forgetMetrics, listen } from "./data.js";
import { showRun } from "./run.js";
import { showEpisodes } from "./episodes.js";
import { showEpisode } from "./episode.js";
import { showHeldOut } from "./heldout.js";
import { showTools } from "./tools.js";
import { showTime } from "./time.js";
import { showConfig } from "./config.js";

const SHOWN_RUNS = 12;
const COLOURS = ["#3b82c4", "#dd8136", "#37a06f", "#b468c2", "#c2a029", "#4fb0b8", "#c95d6b", "#7d83d6"];
const PAGES = { run: ["Run", showRun], episodes: ["Episodes", showEpisodes], episode: [null, showEpisode], heldout: ["Held out", showHeldOut], tools: ["Tools", showTools], time: ["Time", showTime], config: ["Config", showConfig] };
const KEYS = [["1 2 3 4 5 6", "the pages"], ["t", "light or dark"], ["j k", "next, previous row or episode"], ["Enter", "open the row"], ["u", "back to the table"], ["/", "search"], ["l", "logarithmic axes"], ["a", "all metrics"], ["d", "differences between runs"], ["← →", "along a chart that has the focus"], ["Enter", "in a chart: the episodes of its step"], ["0", "whole range again"], ["?", "these keys"]];

const view = document.getElementById("view");
let shown = { leave() {}, news() {}, key() {} };
let runs = [];
let drawing = 0;

export const context = {
  get runs() { return runs; },
  /** The chosen runs, of which the first is the one that a page of a single run is about. */
  get chosen() {
    const names = (place().get("runs") || "").split(",").map(decoded).filter((name) => runs.some((run) => run.name === name));
    const found = names.map((name) => runs.find((run) => run.name === name));
    return found.length ? found : runs.slice(-1);
  },
  colour: (name) => COLOURS[slots().get(name)?.[0] ?? 0],
  dash: (name) => (slots().get(name)?.[1] ? "5 3" : null),
  get place() { return place(); },
  go, address, ask,
};

/** A colour for each chosen run: the one of its place in the list, unless another run has it; dashed if all are taken. */
function slots() {
  const taken = new Map();
  for (const { name } of context.chosen) {
    const first = runs.findIndex((run) => run.name === name) % COLOURS.length;
    const order = COLOURS.map((_, i) => (first + i) % COLOURS.length), used = new Set([...taken.values()].map(([colour]) => colour));
    const free = order.find((colour) => !used.has(colour));
    taken.set(name, free === undefined ? [first, true] : [free, false]);
  }
  return taken;
}

function place() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const found = new URLSearchParams(query);
  found.page = path.split("/")[1] || "run";
  return found;
}

function decoded(text) { try { return decodeURIComponent(text); } catch { return text; } }

/** The address of a page with the same runs; other parameters are those given. */
function address(page, parameters = {}, names = context.chosen.map((run) => run.name)) {
  const query = new URLSearchParams();
  query.set("runs", names.map(encodeURIComponent).join(","));
  for (const [name, value] of Object.entries(parameters)) if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  return `#/${page}?${query}`;
}

function go(page, parameters, names, replace = false) {
  const to = address(page, parameters, names);
  if (replace) { history.replaceState(null, "", to); draw(); } else location.hash = to;
}

function drawFrame() {
  const now = place().page;
  document.getElementById("tabs").replaceChildren(
    ...Object.entries(PAGES).filter(([, [title]]) => title).map(([page, [title]]) => {
      const current = page === now || (page === "episodes" && now === "episode");
      return el("a", { href: address(page), "aria-current": current ? "page" : null }, title);
    }),
  );
  const chosen = context.chosen.map((run) => run.name);
  const first = runs.length <= SHOWN_RUNS ? runs : [...runs.filter((run) => chosen.includes(run.name)), ...runs.filter((run) => !chosen.includes(run.name)).slice(-Math.max(3, SHOWN_RUNS - chosen.length))];
  document.getElementById("runs").replaceChildren(
    ...(first.length < runs.length ? [el("button", { class: "chip", onclick: () => chooseRuns() }, `all ${runs.length.toLocaleString("en")} runs …`)] : []),
    ...first.map((run) => chip(run, chosen)),
  );
}

function chip(run, chosen) {
  const on = chosen.includes(run.name);
  const choose = (event) => {
    const one = !["run", "config"].includes(place().page) && !event.shiftKey;
    const others = chosen.filter((name) => name !== run.name);
    const next = one ? [run.name] : on ? (others.length ? others : chosen) : [...chosen, run.name];
    const page = place().page === "episode" ? "episodes" : place().page;
    go(page, {}, next);
  };
  return el("button", { class: "chip", "aria-pressed": String(on), title: `${run.name}\n${run.folder}`, onclick: choose },
    el("i", { class: `dot${run.live ? " live" : ""}`, style: { background: on ? context.colour(run.name) : "var(--line)" } }), el("span", {}, middle(run.name)));
}

/** A list of all runs, to search in and choose from, where there are too many for a row. */
function chooseRuns() {
  const dialog = document.getElementById("choose"), chosen = new Set(context.chosen.map((run) => run.name));
  const list = el("div", { class: "list" });
  const fill = () => list.replaceChildren(...runs.filter((run) => [run.name, ...run.about.tags].some((text) => text.toLowerCase().includes(search.value.toLowerCase()))).slice(0, 200).map((run) =>
    el("label", {}, el("input", { type: "checkbox", checked: chosen.has(run.name), onchange: (event) => { if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name); } }), el("span", {}, run.name), run.live ? el("span", { class: "badge trained" }, "live") : null, run.about.tags.map((tag) => el("span", { class: "badge" }, tag)))));
  const search = el("input", { type: "search", placeholder: "run …", "aria-label": "runs whose name or tag contains", oninput: fill });
  const show = () => { dialog.close(); if (chosen.size) go(["run", "config"].includes(place().page) ? place().page : "run", {}, [...chosen]); };
  dialog.replaceChildren(el("h2", {}, "Runs"), search, list, el("div", { class: "bar" }, el("button", { onclick: show }, "show these"), el("button", { onclick: () => dialog.close() }, "close")));
  fill();
  dialog.showModal();
}

async function draw() {
  const number = ++drawing;
  shown.leave?.();
  hideTip();
  const page = PAGES[place().page] ? place().page : "run";
  drawFrame();
  if (!runs.length) {
    shown = {};
    view.replaceChildren(el("div", {}, el("p", { class: "empty" }, "No run is in these folders. One that begins there is shown by itself.")));
    return;
  }
  document.title = `${context.chosen.map((run) => run.name).join(", ")} · agentrl`;
  const room = el("div", {});
  try {
    const made = await PAGES[page][1](room, context);
    if (number !== drawing) { made?.leave?.(); return; }
    shown = made || {};
  } catch (error) {
    if (number !== drawing) return;
    shown = {};
    room.replaceChildren(el("p", { class: "error", role: "alert" }, String(error.message || error)));
  }
  view.replaceChildren(room);
  shown.attached?.();
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("agentrl-theme", root.dataset.theme); } catch { /* storage is switched off */ }
  draw();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(el("h2", {}, "Keys"), el("table", {}, el("tbody", {}, KEYS.map(([keys, meaning]) =>
    el("tr", {}, el("td", {}, keys.split(" ").map((key) => [el("kbd", {}, key), " "])), el("td", {}, meaning))))),
  el("p", { class: "soft small" }, "Drag in a chart to zoom, double-click for the whole range. Click runs to compare them."),
  el("form", { method: "dialog" }, el("button", {}, "Close")));
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const page = { 1: "run", 2: "episodes", 3: "heldout", 4: "tools", 5: "time", 6: "config" }[event.key];
  if (page) go(page, {});
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") showKeys();
  else if (!shown.key?.(event.key)) return;
  event.preventDefault();
});
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("help").addEventListener("click", showKeys);
addEventListener("hashchange", draw);
let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => shown.resized?.(), 120); });

try {
  runs = await ask("runs");
  await draw();
} catch (error) {
  view.replaceChildren(el("p", { class: "error", role: "alert" }, String(error.message || error)));
}

listen((news) => {
  if (news.gone) {
    const lost = context.chosen.some((run) => run.name === news.name);
    runs = runs.filter((run) => run.name !== news.name);
    forgetMetrics(news.name);
    if (lost) draw(); else drawFrame();
    return;
  }
  const at = runs.findIndex((run) => run.name === news.name);
  const before = runs[at];
  if (at < 0) runs.push(news); else runs[at] = news;
  if (at < 0 && runs.length === 1) { draw(); return; }  // the page was empty
  if (before?.live !== news.live) drawFrame();  // not for each news: whoever clicks needs the same button until the end
  if (context.chosen.some((run) => run.name === news.name)) shown.news?.(news);
}, (state) => { document.getElementById("link").textContent = state; });
