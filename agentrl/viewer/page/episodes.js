// The page Episodes: a table with filters, the histogram of scores, and a group side by side.

import { ask } from "./data.js";
import { add, duration, el, number } from "./dom.js";

const PAGE = 100;
const COLUMNS = [["id", "episode"], ["step", "step", "number"], ["fate", "fate"], ["score", "score", "number"], [null, "end"], ["num_turns", "turns", "number"], ["num_tokens", "tokens", "number"], ["seconds", "time", "number"], ["staleness", "stale", "number"], ["env", "environment", "wide"], [null, "why", "wide"]];

export async function showEpisodes(room, context) {
  const run = context.chosen[0].name, place = context.place;
  if (place.get("group")) return showGroup(room, context, run, place.get("group"));
  const given = Object.fromEntries([...place].filter(([name]) => name !== "runs"));
  const query = { sort: "step", descending: "true", offset: 0, ...given };
  const [found, choices] = await Promise.all([ask("episodes", { run, ...query, limit: PAGE }), ask("choices", { run })]);
  const change = (changes) => context.go("episodes", Object.fromEntries(Object.entries({ ...given, offset: "", ...changes })), undefined);

  const select = (name, label) => el("label", {}, label, el("select", { onchange: (event) => change({ [name]: event.target.value }) },
    el("option", { value: "" }, "any"), (choices[name] || []).map(([value, count]) => el("option", { value, selected: given[name] === String(value) }, `${value} (${count})`))));
  const field = (name, label) => el("label", {}, label, el("input", { type: "number", step: "any", value: given[name] ?? "", onchange: (event) => change({ [name]: event.target.value }) }));
  const search = el("input", { type: "search", placeholder: "text …  /", value: given.text || "", "aria-label": "messages, ids or reasons that contain", onchange: (event) => change({ text: event.target.value }) });
  const bars = histogram(found.histogram, given, change);
  const clear = Object.keys(given).some((name) => !["sort", "descending", "offset"].includes(name)) ? el("button", { onclick: () => context.go("episodes", {}) }, "clear") : null;
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
  add(room, 
    el("div", { class: "bar" }, search, field("step", "step"), select("fate", "fate"), choices.env.length > 1 ? select("env", "environment") : null, select("status", "end"), choices.layer.length ? select("layer", "failed in") : null, field("stale", "stale ≥"), clear),
    el("div", { class: "bar" }, bars, el("span", { class: "soft small" }, found.histogram.counts.length ? `scores ${number(found.histogram.low)} to ${number(found.histogram.high)}` : "no score")),
    el("div", { class: "panel table" }, table),
    found.rows.length ? null : el("p", { class: "empty" }, "No episode is like this."),
    el("div", { class: "bar", style: { "margin-top": "10px" } },
      el("span", { class: "soft", id: "total" }, found.total ? `${from + 1} to ${from + found.rows.length} of ${found.total.toLocaleString("en")}` : "0"),
      el("button", { disabled: from === 0, onclick: () => turn(Math.max(0, from - PAGE)) }, "previous"),
      el("button", { disabled: from + PAGE >= found.total, onclick: () => turn(from + PAGE) }, "next")));

  const fresh = el("button", { hidden: true, onclick: () => context.go("episodes", given, undefined, true) }, "new episodes: show them");
  room.firstChild.append(fresh);
  let selected = -1, rowsThen = context.chosen[0].rows;
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
      if (rowsThen !== undefined && now.name === run && now.rows !== rowsThen) fresh.hidden = false;
      rowsThen = now.rows;
    },
  };
}

function rowOf(row, context) {
  const to = context.address("episode", { id: row.id, agent: row.agent, step: row.step });
  const open = (event) => { if (!event.target.closest("a")) location.hash = to; };
  const end = row.status ? `${row.status}${row.detail ? `: ${row.detail}` : ""}` : "";
  return el("tr", { class: "open", onclick: open },
    el("td", { class: "mono" }, el("a", { href: to }, row.id), row.agent ? ` ${row.agent}` : ""),
    el("td", { class: "number" }, number(row.step)), el("td", {}, badge(row.fate)),
    el("td", { class: "number" }, number(row.score)), el("td", { class: "soft" }, end),
    el("td", { class: "number" }, number(row.num_turns)), el("td", { class: "number" }, number(row.num_tokens)),
    el("td", { class: "number" }, duration(row.seconds)), el("td", { class: "number" }, number(row.staleness)),
    el("td", { class: "wide soft" }, row.env), el("td", { class: "wide soft why", title: row.why || "" }, row.why || ""));
}

export const badge = (fate) => el("span", { class: `badge ${["trained", "failed", "filtered", "stale", "cancelled"].includes(fate) ? fate : ""}` }, fate);

function histogram(found, given, change) {
  const most = Math.max(1, ...found.counts), width = (found.high - found.low) / (found.counts.length || 1);
  return el("div", { class: "histogram", role: "group", "aria-label": "scores: click for a range" }, found.counts.map((count, i) => {
    const low = found.low + i * width, high = found.low + (i + 1) * width, last = i === found.counts.length - 1;
    const inside = (given.low === undefined || high > Number(given.low)) && (given.high === undefined || low <= Number(given.high));
    const chosen = given.low !== undefined && Math.abs(Number(given.low) - low) < 1e-9;
    const range = chosen ? { low: "", high: "" } : { low, high: last ? found.high : high - width * 1e-6 };
    return el("button", { class: inside && count ? "in" : "", title: `${number(low)} to ${number(high)}: ${count}`, "aria-label": `${count} from ${number(low)} to ${number(high)}`, style: { height: `${count ? 6 + (94 * count) / most : 2}%` }, onclick: () => change(range) });
  }));
}

async function showGroup(room, context, run, task) {
  const found = await ask("group", { run, task });
  const rewards = found.members.map((member) => member.row.score).filter((score) => score !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  add(room, el("h1", {}, `Group of ${task}`), el("p", { class: "soft" }, `${found.members.length} episodes, mean score ${number(mean)}. They began alike; where they part is where credit comes from.`),
    el("div", { class: "columns" }, found.members.map(({ row, messages }) => el("section", { class: "panel" },
      el("h3", {}, el("a", { href: context.address("episode", { id: row.id, agent: row.agent, step: row.step }) }, row.id), " ", badge(row.fate)),
      el("p", { class: "soft small" }, `score ${number(row.score)} · ${row.num_turns ?? 0} turns · ${duration(row.seconds)}`),
      messages.length ? messages.map((message) => el("div", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("header", {}, el("b", {}, message.role)), el("pre", { class: "words" }, message.content))) : el("p", { class: "soft" }, row.why || "nothing was kept of it")))));
  return { key(key) { if (key !== "u") return false; history.back(); return true; } };
}
