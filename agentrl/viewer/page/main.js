// Which page is shown, of which runs; the keys; what arrives while runs go on.

import { el, hideTip } from "./dom.js";
import { ask, forgetMetrics, listen } from "./data.js";
import { showRun } from "./run.js";
import { showEpisodes } from "./episodes.js";
import { showEpisode } from "./episode.js";
import { showTime } from "./time.js";
import { showConfig } from "./config.js";

const COLOURS = ["#3b82c4", "#dd8136", "#37a06f", "#b468c2", "#c2a029", "#4fb0b8", "#c95d6b", "#7d83d6"];
const PAGES = { run: ["Run", showRun], episodes: ["Episodes", showEpisodes], episode: [null, showEpisode], time: ["Time", showTime], config: ["Config", showConfig] };
const KEYS = [["1 2 3 4", "the pages"], ["t", "light or dark"], ["j k", "next, previous row or episode"], ["Enter", "open the row"], ["u", "back to the table"], ["/", "search"], ["l", "logarithmic axes"], ["0", "whole range again"], ["?", "these keys"]];

const view = document.getElementById("view");
let shown = { leave() {}, news() {}, key() {} };
let runs = [];
let drawing = 0;

export const context = {
  get runs() { return runs; },
  /** The chosen runs, of which the first is the one that a page of a single run is about. */
  get chosen() {
    const names = (place().get("runs") || "").split(",").map(decodeURIComponent).filter((name) => runs.some((run) => run.name === name));
    const found = names.map((name) => runs.find((run) => run.name === name));
    return found.length ? found : runs.slice(-1);
  },
  colour: (name) => COLOURS[runs.findIndex((run) => run.name === name) % COLOURS.length],
  get place() { return place(); },
  go, address, ask,
};

function place() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const found = new URLSearchParams(query);
  found.page = path.split("/")[1] || "run";
  return found;
}

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
  document.getElementById("runs").replaceChildren(
    ...runs.map((run) => {
      const on = chosen.includes(run.name);
      const choose = (event) => {
        const one = !["run", "config"].includes(place().page) && !event.shiftKey;
        const others = chosen.filter((name) => name !== run.name);
        const next = one ? [run.name] : on ? (others.length ? others : chosen) : [...chosen, run.name];
        const page = place().page === "episode" ? "episodes" : place().page;
        go(page, {}, next);
      };
      return el("button", { class: "chip", "aria-pressed": String(on), title: run.folder, onclick: choose },
        el("i", { class: `dot${run.live ? " live" : ""}`, style: { background: on ? context.colour(run.name) : "var(--line)" } }), run.name);
    }),
  );
}

async function draw() {
  const number = ++drawing;
  shown.leave?.();
  hideTip();
  const page = PAGES[place().page] ? place().page : "run";
  drawFrame();
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
  const page = { 1: "run", 2: "episodes", 3: "time", 4: "config" }[event.key];
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
  const at = runs.findIndex((run) => run.name === news.name);
  const before = runs[at];
  if (at < 0) runs.push(news); else runs[at] = news;
  if (before && before.generation !== undefined && before.generation !== news.generation) forgetMetrics(news.name);
  if (before?.live !== news.live) drawFrame();  // not for each news: whoever clicks needs the same button until the end
  if (context.chosen.some((run) => run.name === news.name)) shown.news?.(news);
}, (state) => { document.getElementById("link").textContent = state; });
