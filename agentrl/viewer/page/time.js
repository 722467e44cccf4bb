// The page Time: lanes of the resources, what bound the steps, and the episodes of one step.

import { ticks } from "./chart.js";
import { ask } from "./data.js";
import { add, colourOf, duration, el, hideTip, number, percent, showTip } from "./dom.js";
import { drawGraph } from "./graph.js";

const HUES = { trainer: "#3b82c4", weights: "#b468c2", engine: "#37a06f", environments: "#dd8136", rewards: "#c95d6b", "episodes in play": "#7d8a95", "waits for episodes": "#c2a029", evaluation: "#4fb0b8", "rest of the loop": "#8d949b", CPU: "#6a7fdb", memory: "#b07aa1", "disk reads": "#6d9aa8", "disk writes": "#a88f6d" };
const GPU = "#4c9f8c";
const ORDER = ["trainer", "waits for episodes", "weights", "engine", "environments", "rewards", "episodes in play", "evaluation", "rest of the loop"];
const [LEFT, LANE] = [132, 30];
const STALE = ["#37a06f", "#c2a029", "#dd8136", "#c95d6b"];
const chosen = { stale: false };

export async function showTime(room, context) {
  const run = context.chosen[0].name, place = context.place;
  const found = await ask("time", { run, first: place.get("first"), last: place.get("last") });
  if (found.begin === null) { add(room, el("p", { class: "empty" }, context.chosen[0].live ? "No step has begun yet. Load this page again when one has." : "No step of this run was timed: it ended before its first one, or its recipe learns from files (sft, dpo, reward_model).")); return {}; }
  const shown = found.steps.map(([step]) => step), first = shown[0], last = shown.at(-1), all = found.all;
  const step = Number(place.get("step") ?? shown.findLast((each) => found.played.includes(each)) ?? last);
  const move = (by) => {
    const count = shown.length, at = Math.max(0, Math.min(all.length - count, all.indexOf(first) + by * count));
    context.go("time", { first: all[at], last: all[Math.min(all.length, at + count) - 1] });
  };
  const span = (count) => context.go("time", { first: all[Math.max(0, all.indexOf(last) - count + 1)], last });
  const lanes = el("div", { class: "panel lanes" }), gantt = el("div", {}), graph = el("div", { class: "panel lanes" });
  const stale = el("button", { class: "small", "aria-pressed": String(chosen.stale), onclick: () => { chosen.stale = !chosen.stale; stale.setAttribute("aria-pressed", String(chosen.stale)); draw(); } }, "colour by staleness");
  const bound = found.bound ? el("span", { class: "badge" }, `bound by: ${found.bound}`) : null;
  const total = found.busy.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const large = found.busy.filter((one) => one.seconds >= 0.0005 * total), small = found.busy.slice(large.length);
  const rest = small.reduce((sum, one) => sum + one.seconds, 0);
  const busy = [...large.map((one) => [one.set.join(" + ") || "none of these", one.seconds]), ...(small.length ? [[small.length === 1 ? "1 other set" : `${small.length} other sets`, rest]] : [])];
  add(room, 
    el("div", { class: "bar" }, el("h1", {}, first === last ? `Step ${first}` : `Steps ${first} to ${last}`), el("span", { class: "soft" }, duration(found.seconds)), bound,
      el("button", { disabled: first === all[0], onclick: () => move(-1) }, "earlier"), el("button", { disabled: last === all.at(-1), onclick: () => move(1) }, "later"),
      [1, 4, 16, 64].filter((count) => count <= all.length || count === 1).map((count) => el("button", { "aria-pressed": String(shown.length === count), onclick: () => span(count) }, count === 1 ? "1 step" : `${count} steps`))),
    el("ul", { class: "advice" }, found.advice.map((text) => el("li", {}, text))), lanes,
    el("h2", {}, "Stages and channels"), graph,
    el("div", { class: "two" },
      el("section", {}, el("h2", {}, "Who was busy at the same time"), el("div", { class: "panel table" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "busy"), el("th", { class: "number" }, "time"), el("th", { class: "number" }, "share"), el("th", { class: "wide" }))), el("tbody", {}, busy.map(([names, seconds]) => el("tr", {}, el("td", {}, names), el("td", { class: "number" }, duration(seconds)), el("td", { class: "number" }, `${((100 * seconds) / total).toFixed(1)} %`), el("td", { class: "wide", style: { width: "30%" } }, el("div", { class: "meter", style: { width: `${(100 * seconds) / total}%` } })))))))),
      el("section", {}, el("h2", {}, "Episodes of step ", el("select", { "aria-label": "step", onchange: (event) => context.go("time", { first, last, step: event.target.value }, undefined, true) }, shown.map((each) => el("option", { value: each, selected: each === step }, String(each)))), " ", stale), gantt)));
  const drawn = await ask("gantt", { run, step });
  const draw = () => { drawLanes(lanes, found); drawGraph(graph, found.graph, HUES); drawGantt(gantt, drawn, context, step); };
  return { attached: draw, resized: draw };
}

const bytes = (value) => (value === null ? "–" : value >= 2 ** 30 ? `${number(value / 2 ** 30)} GiB` : `${number(value / 2 ** 20)} MiB`);
/** How a lane's value is written, by its unit. */
const WRITTEN = { share: percent, bytes, "bytes/s": (value) => (value === null ? "–" : `${bytes(value)}/s`) };

/** Three times or more along an axis of so many seconds, each with how its text stands at it. */
function timeMarks(seconds) {
  return ticks(0, seconds || 1).at.map((at) => [at, at === 0 ? "start" : at > 0.93 * seconds ? "end" : "middle"]);
}

function drawLanes(holder, found) {
  const width = Math.max(300, holder.clientWidth - 32), px = (seconds) => LEFT + (seconds / found.seconds) * (width - LEFT - 6);
  const order = ({ name, unit }) => (unit ? ORDER.length : ORDER.indexOf(name));  // the machine stands below the run
  const lanes = [...found.lanes].sort((a, b) => order(a) - order(b)).filter((lane) => (lane.intervals || lane.load).length);
  const height = lanes.length * (LANE + 6) + 40;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, style: { width: `${width}px`, height: `${height}px`, display: "block" }, role: "img", "aria-label": "what was busy when" });
  let written = -Infinity;
  for (const [step, at] of found.steps) {
    svg.append(el("line", { class: "axis", x1: px(at), x2: px(at), y1: 0, y2: height - 34 }));
    if (px(at) < written) continue;  // its number would cover the last one
    const long = 7 * String(step).length;
    svg.append(el("text", { class: "tick", x: Math.min(px(at) + 2, width - long), y: height - 20 }, String(step)));
    written = px(at) + 8 + long;
  }
  svg.append(el("text", { class: "tick", x: 0, y: height - 20 }, "step"), el("text", { class: "tick", x: 0, y: height - 4 }, "time"));
  for (const [at, anchor] of timeMarks(found.seconds)) svg.append(el("text", { class: "tick", x: px(at), y: height - 4, "text-anchor": anchor }, at ? duration(at) : "0"));
  lanes.forEach((lane, i) => {
    const top = i * (LANE + 6) + 4, colour = HUES[lane.name] || (lane.name.endsWith("memory") ? HUES.memory : lane.unit ? GPU : "#888");
    svg.append(el("text", { class: "lane-name", x: 0, y: top + LANE / 2 + 4 }, lane.name));
    if (lane.intervals) {
      for (const [from, to] of lane.intervals) {
        const box = el("rect", { x: px(from), y: top + 5, width: Math.max(0.7, px(to) - px(from)), height: LANE - 10, rx: 2, fill: colour, opacity: lane.name === "waits for episodes" ? 0.45 : 0.9 });
        box.addEventListener("pointermove", (event) => showTip(event, lane.name, [["from", duration(from)], ["for", duration(to - from)]]));
        box.addEventListener("pointerleave", hideTip);
        svg.append(box);
      }
      return;
    }
    const peak = Math.max(...lane.load, 0), most = Math.max(lane.most ?? peak, 1e-9), bin = found.seconds / lane.load.length, base = top + LANE - 2;
    const said = WRITTEN[lane.unit] || number, full = lane.unit ? [["most", said(peak)], ...(lane.most ? [["of", said(lane.most)]] : [])] : [["most", number(peak)]];
    const outline = lane.load.map((value, bar) => `L${px(bar * bin).toFixed(1)} ${(base - (value / most) * (LANE - 4)).toFixed(1)}L${px((bar + 1) * bin).toFixed(1)} ${(base - (value / most) * (LANE - 4)).toFixed(1)}`).join("");
    const area = el("path", { d: `M${px(0)} ${base}${outline}L${px(found.seconds)} ${base}Z`, fill: colour, opacity: 0.75 });
    const over = el("rect", { x: LEFT, y: top, width: width - LEFT, height: LANE, fill: "transparent" });
    over.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left - LEFT) / (width - LEFT - 6)) * found.seconds;
      showTip(event, lane.name, [["at", duration(Math.max(0, at))], [lane.unit ? "then" : "at once", said(lane.load[Math.min(lane.load.length - 1, Math.max(0, Math.floor(at / bin)))])], ...full]);
    });
    over.addEventListener("pointerleave", hideTip);
    svg.append(area, over);
  });
  holder.replaceChildren(svg);
}

function drawGantt(holder, episodes, context, step) {
  if (!episodes.length) { holder.replaceChildren(el("p", { class: "empty" }, "No episode of this step was kept.")); return; }
  const row = Math.max(2, Math.min(14, Math.floor(560 / episodes.length))), width = Math.max(300, holder.clientWidth - 32);
  const begin = Math.min(...episodes.map((one) => one.started)), end = Math.max(...episodes.flatMap((one) => [one.started + one.seconds, ...one.scoring.map(([, to]) => to)]));
  const canvas = el("canvas", { class: "gantt", role: "img", "aria-label": `${episodes.length} episodes of step ${step}` });
  const density = devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = width * density; canvas.height = row * episodes.length * density;
  canvas.style.height = `${row * episodes.length}px`;
  pen.scale(density, density);
  const px = (at) => ((at - begin) / (end - begin || 1)) * width, line = colourOf("--line");
  episodes.forEach((one, i) => {
    const y = i * row, thick = Math.max(1, row - 1);
    pen.globalAlpha = one.fate === "trained" ? 1 : 0.45;
    pen.fillStyle = line;
    pen.fillRect(px(one.started), y, Math.max(1, px(one.started + one.seconds) - px(one.started)), thick);
    one.turns.forEach(([asked, model, env], turn) => {
      pen.fillStyle = chosen.stale ? STALE[Math.min(one.stale[turn], STALE.length - 1)] : HUES.engine;
      pen.fillRect(px(asked), y, Math.max(0.4, px(asked + model) - px(asked)), thick);
      pen.fillStyle = HUES.environments;
      pen.fillRect(px(asked + model), y, px(asked + model + env) - px(asked + model), thick);
    });
    pen.fillStyle = HUES.rewards;
    for (const [from, to] of one.scoring) pen.fillRect(px(from), y, px(to) - px(from), thick);
  });
  const at = (event) => episodes[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / row)];
  canvas.addEventListener("pointermove", (event) => {
    const one = at(event);
    if (!one) return;
    const sum = (column) => one.turns.reduce((total, turn) => total + turn[column], 0);
    showTip(event, one.id, [["fate", one.fate], ["score", number(one.score)], ["turns", String(one.turns.length)], ["begins after", duration(one.started - begin)], ["lasts", duration(one.seconds)], ["model", duration(sum(1)), HUES.engine], ["environment", duration(sum(2)), HUES.environments], ["rewards", duration(one.scoring.reduce((total, [from, to]) => total + to - from, 0)), HUES.rewards], ["versions behind", ages(one.stale)]]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => { const one = at(event); if (one) context.go("episode", { id: one.id, agent: one.agent, step }); });
  const marks = timeMarks(end - begin).map(([after, anchor]) => el("span", { class: anchor, style: { left: `${(100 * after) / (end - begin || 1)}%` } }, after ? duration(after) : "0"));
  holder.replaceChildren(el("div", { class: "panel" }, canvas, el("div", { class: "time-axis", "aria-hidden": "true" }, marks), el("p", { class: "soft small" }, `${episodes.length} episodes over ${duration(end - begin)}. ${chosen.stale ? "The model's answers by how many versions of the weights they are behind this step: green 0, yellow 1, orange 2, red more." : "Green: the model answers; orange: the environment works;"} red at the end: rewards; grey: none of them; pale: some of those that were not trained on. Click one to open it.`)));
}

/** How many versions the turns of an episode are behind, such as "0" or "0 to 2". */
function ages(stale) {
  const low = Math.min(...stale), high = Math.max(...stale);
  return stale.length ? (low === high ? String(low) : `${low} to ${high}`) : "–";
}
