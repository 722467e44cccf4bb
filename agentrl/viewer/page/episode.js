// The page of one episode: its fate, the conversation, each token with what is known of it, samples and forks.

import { ask } from "./data.js";
import { add, colourOf, duration, el, hideTip, number, showTip } from "./dom.js";
import { badge } from "./episodes.js";

// How a token is coloured: what it is called, its value, and the ends of the scale (a single colour: more of it).
const COLOURINGS = {
  none: { title: "nothing" },
  mask: { title: "loss", value: (t) => (t.advantage === null ? (t.sampled ? 0 : null) : 1), scale: [0, 1], hue: 150 },
  engine: { title: "logprob (engine)", value: (t) => t.engine, scale: [-4, 0], hue: 32, flip: true },
  trainer: { title: "logprob (trainer)", value: (t) => t.old, scale: [-4, 0], hue: 32, flip: true },
  gap: { title: "trainer − engine", value: (t) => (t.old === null ? null : t.old - t.engine), both: true },
  ratio: { title: "ratio of the update", value: (t) => (t.updated === null ? null : Math.exp(t.updated - t.old) - 1), both: true, shown: (v) => v + 1 },
  entropy: { title: "entropy", value: (t) => t.entropy, range: true, hue: 48 },
  advantage: { title: "advantage", value: (t) => t.advantage, both: true },
  version: { title: "weights' version", value: (t) => t.version, range: true, hue: 265 },
  reasoning: { title: "reasoning", value: (t) => (t.sampled ? Number(t.reasoning) : null), scale: [0, 1], hue: 200 },
};
const LONG = 1500;
const chosen = { by: "advantage", tokens: false, tab: "conversation" };

export async function showEpisode(room, context) {
  const run = context.chosen[0].name, place = context.place;
  const found = await ask("episode", { run, id: place.get("id"), agent: place.get("agent"), step: place.get("step") });
  const { row, trajectory } = found;
  const content = el("div", {});
  const facts = [["score", number(row.score)], ["success", row.success === null ? "–" : row.success ? "yes" : "no"], ["end", row.status ? `${row.status}${row.detail ? `: ${row.detail}` : ""}` : "–"], ["turns", number(row.num_turns)], ["sampled tokens", number(row.num_tokens)], ["time", duration(row.seconds)], ["staleness", number(row.staleness)], ["environment", row.env], ["seed", trajectory ? String(trajectory.seed) : "–"]];
  const parts = trajectory ? Object.entries(parsed(trajectory.parts) || {}) : [];
  for (const [name, value] of parts.length > 1 ? parts : []) facts.push([name, number(value)]);
  const tabs = el("div", { class: "bar", role: "group", "aria-label": "views" }, ["conversation", "samples", "raw"].map((name) => el("button", { "aria-pressed": String(chosen.tab === name), onclick: () => { chosen.tab = name; fill(); for (const each of tabs.children) each.setAttribute?.("aria-pressed", String(each.textContent === name)); } }, name)),
    el("a", { href: context.address("episodes", { group: row.task }) }, "its group side by side"));
  add(room, el("h1", {}, row.id, row.agent ? ` (${row.agent})` : "", " ", badge(row.fate)),
    el("p", { class: `fate ${row.fate}` }, found.fate),
    found.others.length > 1 ? el("p", { class: "small" }, "Also: ", found.others.filter((o) => o.agent !== row.agent || o.step !== row.step).map((o) => [el("a", { href: context.address("episode", { id: row.id, agent: o.agent, step: o.step }) }, `${o.agent || "part"} at step ${o.step}`), " "])) : null,
    el("dl", { class: "facts", style: { margin: "0 0 14px" } }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("b", {}, value)))),
    tabs, content);

  function fill() {
    if (chosen.tab === "raw") content.replaceChildren(el("pre", { class: "panel words" }, JSON.stringify(found, null, 1)));
    else if (!trajectory) content.replaceChildren(el("p", { class: "empty" }, "Only its fate was kept (observe.untrained_episodes: how many of each kind are kept whole)."));
    else if (chosen.tab === "samples") content.replaceChildren(tree(trajectory, found.samples), samplesTable(found.samples));
    else content.replaceChildren(conversation(trajectory));
  }
  fill();
  const step = async (by) => {
    const listed = await ask("episodes", { run, step: row.step, sort: "id", descending: "false", limit: 1000 });
    const at = listed.rows.findIndex((each) => each.id === row.id && each.agent === row.agent);
    const next = listed.rows[at + by];
    if (next) context.go("episode", { id: next.id, agent: next.agent, step: next.step }, undefined, true);
  };
  return {
    key(key) {
      if (key === "j") step(1);
      else if (key === "k") step(-1);
      else if (key === "u") context.go("episodes", {});
      else return false;
      return true;
    },
  };
}

function parsed(text) { try { return JSON.parse(text); } catch { return null; } }

function conversation(trajectory) {
  const turns = trajectory.turns || [], known = turns.some((turn) => turn.sample !== null), numbers = turns.some((turn) => turn.trainer.advantages.some((value) => value !== null));
  if (!numbers && ["advantage", "ratio", "trainer", "gap", "mask"].includes(chosen.by)) chosen.by = "engine";
  const legend = el("span", { class: "legend" }), list = el("div", { class: "turns" });
  const by = el("select", { "aria-label": "colour tokens by", onchange: (event) => { chosen.by = event.target.value; fill(); } }, Object.entries(COLOURINGS).map(([name, { title }]) => el("option", { value: name, selected: name === chosen.by }, title)));
  const tokens = el("button", { "aria-pressed": String(chosen.tokens), onclick: () => { chosen.tokens = !chosen.tokens; tokens.setAttribute("aria-pressed", String(chosen.tokens)); fill(); } }, "whole prompts as tokens");
  const note = numbers ? null : el("span", { class: "soft small" }, known ? "The trainer's numbers were not kept for this group (observe.token_groups)." : "");
  list.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) tokenTip(event, token.about); else hideTip();
  });
  list.addEventListener("pointerleave", hideTip);

  function fill() {
    const scale = scaleOf(COLOURINGS[chosen.by], turns);
    legend.replaceChildren(...legendOf(scale));
    list.replaceChildren(...(chosen.tokens ? turns.map((turn, i) => tokenTurn(turn, i, scale)) : messageTurns(trajectory, scale)));
  }
  fill();
  return el("div", {}, el("div", { class: "bar" }, el("label", {}, "colour by", by), legend, tokens, note), list);
}

/** The messages; an answer is shown as its tokens, and what the model was shown with the environment's own picture of it. */
function messageTurns(trajectory, scale) {
  let answers = 0;
  const drawn = trajectory.messages.map((message, i) => {
    const asked = trajectory.messages[i + 1]?.role === "assistant" ? trajectory.turns[answers]?.picture : null;
    const last = i === trajectory.messages.length - 1 ? trajectory.picture : null;
    if (message.role !== "assistant" || !trajectory.turns[answers]) return el("article", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("header", {}, el("b", {}, message.role)), el("div", { class: "shown" }, el("pre", { class: "words" }, message.content || ""), picture(asked || last)));
    const number = answers++, turn = trajectory.turns[number], calls = parsed(message.tool_calls) || [];
    return el("article", { class: `message assistant${turn.forked ? " forked" : ""}` }, turnHead(turn, number),
      el("div", { class: "words" }, tokensOf(turn, scale)),
      calls.map((call) => el("div", { class: "call mono" }, `${call.name}(${JSON.stringify(call.arguments)})`)), infoOf(turn));
  });
  const ended = trajectory.messages.at(-1)?.role === "assistant" ? picture(trajectory.picture) : null;
  return ended ? [...drawn, el("article", { class: "message" }, el("header", {}, el("b", {}, "how it ended")), ended)] : drawn;
}

const FRAME = `<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"><meta http-equiv="x-dns-prefetch-control" content="off"><style>body{margin:6px;font:14px sans-serif;color:#22303c;background:#fff}svg,img{max-width:100%;max-height:calc(100vh - 12px)}</style>`;

/** An environment's picture, in a frame where no script runs, and from which nothing can be asked or opened. */
function picture(html) {
  return html ? el("iframe", { class: "picture", sandbox: "", referrerpolicy: "no-referrer", loading: "lazy", title: "the environment's picture", srcdoc: FRAME + html }) : null;
}

function tokenTurn(turn, number, scale) {
  const prompt = turn.prompt.map((text, i) => tokenOf(text, { id: turn.prompt_ids[i], text, sampled: false, engine: null, old: null, updated: null, entropy: null, advantage: null, version: null }, null));
  const shown = el("div", { class: "words" }, prompt.slice(0, LONG));
  const more = prompt.length > LONG ? el("button", { onclick: () => { shown.append(...prompt.slice(LONG)); more.remove(); } }, `${prompt.length - LONG} more tokens`) : null;
  return el("article", { class: `message assistant${turn.forked ? " forked" : ""}` }, turnHead(turn, number), shown, more, el("div", { class: "words" }, tokensOf(turn, scale)), infoOf(turn));
}

function turnHead(turn, at) {
  const facts = [turn.sample !== null ? `sample ${turn.sample}` : null, turn.forked ? "forked: a new sample begins here" : null,
    turn.reward ? `reward ${number(turn.reward)}` : null, `${turn.token_ids.length} tokens, ${turn.prompt_ids.length} new before them`,
    `model ${duration(turn.generate_seconds)}`, `environment ${duration(turn.env_seconds)}`, turn.finish_reason !== "stop" ? `ended by ${turn.finish_reason}` : null];
  return el("header", {}, el("b", {}, `turn ${at}`), facts.filter(Boolean).map((text) => el("span", {}, text)));
}

function infoOf(turn) {
  const info = parsed(turn.info);
  return info && Object.keys(info).length ? el("details", {}, el("summary", { class: "soft small" }, "info"), el("pre", { class: "words" }, JSON.stringify(info, null, 1))) : null;
}

function about(turn) {
  let reasoning = false;
  return turn.tokens.map((text, i) => {
    if (text.includes("<think>")) reasoning = true;
    const one = { id: turn.token_ids[i], text, sampled: true, engine: turn.logprobs[i], old: turn.trainer.old_logprobs[i], updated: turn.trainer.logprobs[i], entropy: turn.trainer.entropies[i], advantage: turn.trainer.advantages[i], version: turn.policy_versions[i], reasoning };
    if (text.includes("</think>")) reasoning = false;
    return one;
  });
}

const tokensOf = (turn, scale) => about(turn).map((one) => tokenOf(one.text, one, scale));

function tokenOf(text, facts, scale) {
  const made = el("span", { class: `token${facts.sampled ? "" : " prompt"}` }, text === "" ? "∅" : text);
  made.about = facts;
  const colour = scale && scale.colour(facts);
  if (colour) made.style.background = colour;
  return made;
}

function tokenTip(event, facts) {
  const rows = [["token", String(facts.id)]];
  if (facts.sampled) {
    rows.push(["logprob (engine)", exact(facts.engine)], ["version", String(facts.version)]);
    if (facts.old !== null) rows.push(["logprob (trainer)", exact(facts.old)], ["ratio trainer / engine", exact(Math.exp(facts.old - facts.engine))], ["ratio of the update", exact(Math.exp(facts.updated - facts.old))]);
    if (facts.entropy !== null) rows.push(["entropy", exact(facts.entropy)]);
    rows.push(facts.advantage !== null ? ["advantage", exact(facts.advantage)] : ["loss", "unknown, or none"]);
    rows.push(["probability", exact(Math.exp(facts.engine))]);
  } else rows.push(["", "part of the prompt: no loss"]);
  showTip(event, JSON.stringify(facts.text), rows);
}

const exact = (value) => (value === null || Number.isNaN(value) ? "–" : value.toPrecision(5));

function scaleOf(colouring, turns) {
  if (!colouring.value) return { colour: () => null };
  const values = turns.flatMap(about).map(colouring.value).filter((value) => value !== null && Number.isFinite(value));
  const dark = luminance(colourOf("--bg")) < 0.4, tone = dark ? 38 : 72;
  const most = values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
  const [low, high] = colouring.both ? [-most, most] : colouring.range ? [Math.min(...values), Math.max(...values)] : colouring.scale;
  const paint = (value) => {
    if (colouring.both) return `hsl(${value < 0 ? 12 : 150} 65% ${tone}% / ${Math.min(1, Math.abs(value) / most).toFixed(3)})`;
    const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 1;
    return `hsl(${colouring.hue} 70% ${tone}% / ${(colouring.flip ? 1 - share : colouring.range ? 0.15 + 0.85 * share : share).toFixed(3)})`;
  };
  return {
    low, high, paint, known: values.length > 0, title: colouring.title, shown: colouring.shown || ((value) => value),
    colour: (facts) => { const value = colouring.value(facts); return value === null || value === undefined || !Number.isFinite(value) ? null : paint(value); },
  };
}

function luminance(colour) {
  const parts = /^#(..)(..)(..)$/.exec(colour);
  return parts ? parts.slice(1).reduce((sum, part) => sum + Number.parseInt(part, 16), 0) / 765 : 1;
}

function legendOf(scale) {
  if (!scale.paint) return [];
  if (!scale.known) return ["not known for these tokens"];
  const canvas = el("canvas", { width: 120, height: 10 }), pen = canvas.getContext("2d");
  for (let x = 0; x < 120; x++) { pen.fillStyle = scale.paint(scale.low + ((scale.high - scale.low) * x) / 119); pen.fillRect(x, 0, 1, 10); }
  return [number(scale.shown(scale.low)), canvas, number(scale.shown(scale.high))];
}

/** The turns as dots; a fork begins a new row, which is a training sample of its own. */
function tree(trajectory, samples) {
  const turns = trajectory.turns || [], step = Math.max(10, Math.min(28, 900 / Math.max(1, turns.length)));
  let row = 0;
  const places = turns.map((turn, i) => { if (turn.forked && i) row++; return [30 + i * step, 20 + row * 34]; });
  const svg = el("svg", { viewBox: `0 0 ${Math.max(260, 60 + turns.length * step)} ${44 + row * 34}`, style: { "max-width": `${Math.max(260, 60 + turns.length * step)}px`, width: "100%" }, role: "img", "aria-label": "turns and forks" });
  places.forEach(([x, y], i) => {
    if (i) svg.append(el("path", { d: `M${places[i - 1][0]} ${places[i - 1][1]}C${x - step / 2} ${places[i - 1][1]} ${x - step / 2} ${y} ${x} ${y}`, fill: "none", stroke: turns[i].forked ? "var(--warn)" : "var(--soft)", "stroke-width": 1.6 }));
  });
  places.forEach(([x, y], i) => {
    const dot = el("circle", { cx: x, cy: y, r: 6, fill: turns[i].sample === null ? "var(--line)" : "var(--accent)", stroke: "var(--panel)", "stroke-width": 2 });
    dot.addEventListener("pointermove", (event) => showTip(event, `turn ${i}`, [["sample", turns[i].sample === null ? "none" : String(turns[i].sample)], ["reward", number(turns[i].reward)], ["tokens", String(turns[i].token_ids.length)]]));
    dot.addEventListener("pointerleave", hideTip);
    svg.append(dot);
  });
  return el("section", { class: "panel" }, el("h3", {}, row ? `${row + 1} branches: the conversation forked ${row === 1 ? "once" : `${row} times`}` : "One branch: each turn continues the tokens of the one before"), svg);
}

function samplesTable(samples) {
  if (!samples.length) return el("p", { class: "empty" }, "No training sample was made of it.");
  const columns = ["step", "sample", "first_turn", "last_turn", "tokens", "loss_tokens", "advantage", "weight"];
  return el("div", { class: "panel table", style: { "margin-top": "12px" } }, el("table", {}, el("thead", {}, el("tr", {}, columns.map((name) => el("th", { class: "number" }, name.replace("_", " "))))), el("tbody", {}, samples.map((one) => el("tr", {}, columns.map((name) => el("td", { class: "number" }, number(one[name]))))))));
}
