// The page Episodes: a table with filters, the histogram of scores, and a group side by side.

import { ticks } from "./chart.js";
import { ask } from "./data.js";
import { add, duration, el, number, visible } from "./dom.js";

const PAGE = 100;
const COLUMNS = [["id", "episode"], ["step", "step", "number"], ["fate", "fate"], ["score", "score", "number"], [null, "end"], ["num_turns", "turns", "number"], ["num_tokens", "tokens", "number"], ["seconds", "time", "number"], ["staleness", "stale", "number"], ["env", "environment", "wide"], [null, "why", "wide"]];

export async function showEpisodes(room, context) {
  const { name: run, live } = context.chosen[0], place = context.place;
  if (place.get("group")) return showGroup(room, context, run, place.get("group"));
  const given = Object.fromEntries([...place].filter(([name]) => name !== "runs"));
  const query = { sort: "step", descending: "true", offset: 0, ...given };
  const [found, choices] = await Promise.all([ask("episodes", { run, ...query, limit: PAGE }), ask("choices", { run, evaluation: given.evaluation })]);
  const change = (changes) => context.go("episodes", Object.fromEntries(Object.entries({ ...given, offset: "", ...changes })), undefined);

  const select = (name, label) => el("label", {}, label, el("select", { onchange: (event) => change({ [name]: event.target.value }) },
    el("option", { value: "" }, "any"), (choices[name] || []).map(([value, count]) => el("option", { value, selected: given[name] === String(value) }, `${value} (${count})`))));
  const field = (name, label) => el("label", {}, label, el("input", { type: "number", step: "any", value: given[name] ?? "", onchange: (event) => change({ [name]: event.target.value }) }));
  const search = el("input", { type: "search", placeholder: "text …  /", value: given.text || "", "aria-label": "messages, ids or reasons that contain", onchange: (event) => change({ text: event.target.value }) });
  const filtered = Object.keys(given).some((name) => !["sort", "descending", "offset", "evaluation"].includes(name));
  const played = choices.evaluation.length ? el("label", {}, "played for", el("select", { onchange: (event) => context.go("episodes", { evaluation: event.target.value }) },
    el("option", { value: "" }, "training"), choices.evaluation.map(([name, count]) => el("option", { value: name, selected: given.evaluation === name }, `${name.replaceAll("_", " ")} (${count})`)))) : null;
  const tool = given.tool ? el("span", { class: "badge" }, given.refused ? `a call of ${given.tool} failed` : `calls ${given.tool}`) : null;
  const bars = histogram(found.histogram, given, change);
  const clear = filtered ? el("button", { onclick: () => context.go("episodes", { evaluation: given.evaluation }) }, "clear") : null;
  const { low, high, counts } = found.histogram;
  const sorted = (column) => el("button", { onclick: () => change({ sort: column, descending: String(!(query.sort === column && query.descending === "true")) }) });
  const body = el("tbody", {}, found.rows.map((row) => rowOf(row, context)));
  const table = el("table", { "aria-label": "episodes" }, el("thead", {}, el("tr", {}, COLUMNS.map(([column, title, kind]) => {
    if (!column) return el("th", { class: kind || "" }, title);
    const button = sorted(column);
    button.append(title, query.sort === column ? (query.descending === "true" ? " ↓" : " ↑") : "");
    return el("th", { class: kind || "", "aria-sort": query.sort === column ? (query.descending === "true" ? "descending" : "ascending") : null }, button);
  }))), body);
  const from = Number(query.offset);
  const turn = (to) => context.go("episodes", { ...given, offset: to || "" });
  add(room, el("h1", { class: "unseen" }, `Episodes of ${run}`),
    el("div", { class: "bar" }, search, played, field("step", given.evaluation ? "after steps" : "step"), select("fate", "fate"), choices.env.length > 1 ? select("env", "environment") : null, select("status", "end"), choices.layer.length ? select("layer", "failed in") : null, field("stale", "stale ≥"), tool, clear),
    el("div", { class: "bar" }, bars, el("span", { class: "soft small" }, !counts.length ? "no score" : low === high ? `all scores are ${number(low)}` : `scores ${number(low)} to ${number(high)}`), field("low", "score ≥"), field("high", "score ≤")),
    found.unreadable.length ? el("details", { class: "panel warning" }, el("summary", {}, found.unreadable.length === 1 ? "1 file cannot be read" : `${found.unreadable.length} files cannot be read`, ": their episodes are not shown, or not whole"), el("ul", {}, found.unreadable.map((text) => el("li", { class: "mono" }, visible(text))))) : null,
    found.rows.length ? el("div", { class: "panel table", tabindex: 0, role: "region", "aria-label": "episodes" }, table)
      : el("p", { class: "empty" }, filtered ? "No episode is like this: clear the filters to see all." : live ? "No episode has ended yet. Load this page again when the first step is done." : "This run has no episodes: it ended before its first step was recorded, or its recipe learns from files (sft, dpo, reward_model)."),
    el("div", { class: "bar", hidden: !found.total, style: { "margin-top": "10px" } },
      el("span", { class: "soft", id: "total" }, `${(from + 1).toLocaleString("en")} to ${(from + found.rows.length).toLocaleString("en")} of ${found.total.toLocaleString("en")}`),
      el("button", { disabled: from === 0, onclick: () => turn(Math.max(0, from - PAGE)) }, "previous"),
      el("button", { disabled: from + PAGE >= found.total, onclick: () => turn(from + PAGE) }, "next")));

  const fresh = el("button", { hidden: true, onclick: () => context.go("episodes", given, undefined, true) }, "new episodes: show them");
  room.firstChild.append(fresh);
  let selected = -1, then = context.chosen[0].stamp;
  const mark = (to) => {
    if (!body.children.length) return;
    body.children[selected]?.removeAttribute("aria-selected");
    selected = Math.min(Math.max(to, 0), body.children.length - 1);
    body.children[selected].setAttribute("aria-selected", "true");
    body.children[selected].scrollIntoView({ block: "nearest" });
  };
  return {
    key(key) {
      if (key === "j" || key === "ArrowDown") mark(selected + 1);
      else if (key === "k" || key === "ArrowUp") mark(selected - 1);
      else if (key === "Enter" && selected >= 0) body.children[selected].click();
      else if (key === "/") search.focus();
      else return false;
      return true;
    },
    news(now) {
      if (now.name === run && now.stamp !== then) fresh.hidden = false;
    },
  };
}

function rowOf(row, context) {
  const to = context.address("episode", { id: row.id, agent: row.agent, step: row.step });
  const open = (event) => { if (!event.target.closest("a")) location.hash = to; };
  const end = visible(row.status ? `${row.status}${row.detail ? `: ${row.detail}` : ""}` : ""), why = visible(row.why);
  return el("tr", { class: "open", onclick: open },
    el("td", { class: "mono" }, el("a", { href: to, class: "id", title: row.id }, visible(row.id)), row.agent ? ` ${row.agent}` : ""),
    el("td", { class: "number" }, number(row.step)), el("td", {}, badge(row.fate)),
    el("td", { class: "number" }, number(row.score)), el("td", { class: "soft why", title: end }, end),
    el("td", { class: "number" }, number(row.num_turns)), el("td", { class: "number" }, number(row.num_tokens)),
    el("td", { class: "number" }, duration(row.seconds)), el("td", { class: "number" }, number(row.staleness)),
    el("td", { class: "wide soft" }, row.env), el("td", { class: "wide soft why", title: why }, why));
}

/** The tool calls of a message, each in a line. */
export function callsOf(message) {
  let calls = [];
  try { calls = JSON.parse(message.tool_calls || "[]"); } catch { /* shown by the message itself */ }
  return calls.map((call) => el("div", { class: "call mono" }, visible(`${call.name}(${JSON.stringify(call.arguments)})`)));
}

export const badge = (fate) => el("span", { class: `badge ${["trained", "masked", "failed", "filtered", "stale", "cancelled", "held_out"].includes(fate) ? fate : ""}` }, fate.replaceAll("_", " "));

function histogram(found, given, change) {
  if (found.low === found.high) return null;
  const most = Math.max(1, ...found.counts), width = (found.high - found.low) / (found.counts.length || 1);
  const bars = el("div", { class: "histogram", role: "group", "aria-label": "scores: click for a range" }, found.counts.map((count, i) => {
    const low = found.low + i * width, high = found.low + (i + 1) * width, last = i === found.counts.length - 1;
    const inside = (given.low === undefined || high > Number(given.low)) && (given.high === undefined || low <= Number(given.high));
    const chosen = given.low !== undefined && Math.abs(Number(given.low) - low) < 1e-9;
    const range = chosen ? { low: "", high: "" } : { low, high: last ? found.high : high - width * 1e-6 };
    return el("button", { class: inside && count ? "in" : "", title: `${number(low)} to ${number(high)}: ${count}`, "aria-label": `${count} from ${number(low)} to ${number(high)}`, style: { height: `${count ? 6 + (94 * count) / most : 2}%` }, onclick: () => change(range) });
  }));
  const marks = ticks(found.low, found.high).at.map((at) => el("span", { style: { left: `${(100 * (at - found.low)) / (found.high - found.low)}%` } }, number(at)));
  return el("div", { class: "distribution" }, bars, el("div", { class: "score-axis", "aria-hidden": "true" }, marks));
}

async function showGroup(room, context, run, task) {
  const found = await ask("group", { run, task });
  const rewards = found.members.map((member) => member.row.score).filter((score) => score !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  add(room, el("h1", {}, `Group of ${task}`), el("p", { class: "soft" }, `${found.members.length} episodes, mean score ${number(mean)}. They began alike; where they part is where credit comes from.`),
    found.trees.length ? treesOf(found.trees) : null,
    el("div", { class: "columns" }, found.members.map(({ row, messages }) => el("section", { class: "panel" },
      el("h3", {}, el("a", { href: context.address("episode", { id: row.id, agent: row.agent, step: row.step }) }, row.id), " ", badge(row.fate)),
      el("p", { class: "soft small" }, `score ${number(row.score)} · ${row.num_turns ?? 0} turns · ${duration(row.seconds)}`),
      messages.length ? messages.map((message) => el("div", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("header", {}, el("b", {}, message.role)),
        message.reasoning ? el("pre", { class: "words reasoning" }, visible(message.reasoning)) : null, message.content || !message.tool_calls ? el("pre", { class: "words" }, visible(message.content)) : null, callsOf(message))) : el("p", { class: "soft" }, visible(row.why) || "nothing was kept of it")))));
  return { key(key) { if (key !== "u") return false; history.back(); return true; } };
}

/** The trees of a group: a line of turns for each episode, which begins where it has left another one, and the values of the states there. */
function treesOf(nodes) {
  const longest = Math.max(1, ...nodes.map((one) => one.turns ?? 0)), step = Math.max(14, Math.min(60, 640 / longest)), begin = 20;
  const height = 26 + 34 * nodes.length, width = begin + longest * step + 330, row = new Map(nodes.map((one, i) => [one.id, 24 + 34 * i])), x = (turn) => begin + turn * step;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, style: { "max-width": `${width}px`, width: "100%" }, role: "img", "aria-label": `${nodes.length} episodes, of which ${nodes.filter((one) => one.left).length} have left others` });
  for (const one of nodes) {
    const y = row.get(one.id), from = one.left ? one.turn : 0, up = row.get(one.left);
    if (up !== undefined) svg.append(el("path", { d: `M${x(from)} ${up}V${y}`, fill: "none", stroke: "var(--warn)", "stroke-width": 1.6 }));
    svg.append(el("path", { d: `M${x(from)} ${y}H${x(Math.max(from, one.turns ?? from))}`, fill: "none", stroke: "var(--accent)", "stroke-width": 2 }));
    for (let turn = from + 1; turn <= (one.turns ?? 0); turn++) svg.append(el("circle", { cx: x(turn), cy: y, r: 3, fill: "var(--accent)" }));
    svg.append(el("text", { class: "tick", x: x(one.turns ?? from) + 10, y: y + 4 }, `${number(one.score)} · ${visible(one.id)}${one.left ? `, from turn ${one.turn}` : ""}`));
  }
  for (const one of nodes) for (const state of one.states) {
    const dot = el("circle", { cx: x(state.turn), cy: row.get(one.id), r: 6, fill: "var(--warn)", stroke: "var(--panel)", "stroke-width": 2 });
    svg.append(dot, el("text", { class: "tick", x: x(state.turn), y: row.get(one.id) - 9, "text-anchor": "middle" }, number(state.value)));
  }
  return el("section", { class: "panel trees" }, el("h3", {}, "Who has left whom"), svg, el("p", { class: "soft small" }, "A line is an episode, a small dot the end of a turn, a large one a state in which others have left it. Above it stands the mean score of all that went through it; at the end of a line stands the episode's own."));
}
