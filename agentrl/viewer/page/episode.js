// The page of one episode: its fate, the conversation, each token with what is known of it, samples and forks.

import { ask } from "./data.js";
import { add, colourOf, duration, el, hideTip, number, showTip, visible } from "./dom.js";
import { badge, callsOf } from "./episodes.js";

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
const LONG = 1500, LONG_TEXT = 20000, RAW = 200000;
const chosen = { by: "advantage", tokens: false, tab: "conversation" };

export async function showEpisode(room, context) {
  const run = context.chosen[0].name, place = context.place;
  const found = await ask("episode", { run, id: place.get("id"), agent: place.get("agent"), step: place.get("step") });
  const { row, trajectory } = found;
  const content = el("div", {});
  const facts = [["score", number(row.score)], ["success", row.success === null ? "–" : row.success ? "yes" : "no"], ["end", row.status ? `${row.status}${row.detail ? `: ${row.detail}` : ""}` : "–"], ["turns", number(row.num_turns)], ["sampled tokens", number(row.num_tokens)], ["time", duration(row.seconds)], ["staleness", number(row.staleness)], ["environment", row.env], ["seed", trajectory ? String(trajectory.seed) : "–"]];
  const tabs = el("div", { class: "bar", role: "group", "aria-label": "views" }, ["conversation", "samples", "raw"].map((name) => el("button", { "aria-pressed": String(chosen.tab === name), onclick: () => { chosen.tab = name; fill(); for (const each of tabs.children) each.setAttribute?.("aria-pressed", String(each.textContent === name)); } }, name)),
    el("a", { href: context.address("episodes", { group: row.task }) }, row.evaluation ? "in all evaluations side by side" : "its group side by side"));
  add(room, el("h1", {}, row.id, row.agent ? ` (${row.agent})` : "", " ", badge(row.fate)),
    el("p", { class: `fate ${row.fate}` }, visible(found.fate)),
    found.others.length > 1 ? el("p", { class: "small" }, "Also: ", found.others.filter((o) => o.agent !== row.agent || o.step !== row.step).map((o, i) => [i ? " · " : "", el("a", { href: context.address("episode", { id: row.id, agent: o.agent, step: o.step }) }, row.evaluation ? `${o.agent} after ${o.step} steps: ${number(o.score)}` : `${o.agent || "part"} at step ${o.step}`)])) : null,
    row.parent ? el("p", { class: "small" }, "It has left ", el("a", { href: context.address("episode", { id: row.parent, step: row.step }) }, row.parent), ` at turn ${row.branch_turn}, and shares the turns before with it.`) : null,
    el("dl", { class: "facts", style: { margin: "0 0 14px" } }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, visible(value)))))),
    trajectory ? rewardsOf(trajectory) : null, tabs, content);

  function fill() {
    if (chosen.tab === "raw") content.replaceChildren(...raw(found));
    else if (!trajectory) content.replaceChildren(el("p", { class: "empty" }, "Only its fate was kept (observe.untrained_episodes: how many of each kind are kept whole)."));
    else if (chosen.tab === "samples") content.replaceChildren(tree(trajectory), samplesTable(found.samples));
    else content.replaceChildren(conversation(trajectory, found.replay));
  }
  fill();
  const step = async (by) => {
    const listed = await ask("episodes", { run, evaluation: row.evaluation, step: row.step, sort: "id", descending: "false", limit: 1000 });
    const at = listed.rows.findIndex((each) => each.id === row.id && each.agent === row.agent);
    const next = listed.rows[at + by];
    if (next) context.go("episode", { id: next.id, agent: next.agent, step: next.step }, undefined, true);
  };
  return {
    key(key) {
      if (key === "j") step(1);
      else if (key === "k") step(-1);
      else if (key === "u") context.go("episodes", { evaluation: row.evaluation });
      else return false;
      return true;
    },
  };
}

/** The parts of the score, and what judges said of them. */
function rewardsOf(trajectory) {
  const parts = Object.entries(parsed(trajectory.parts) || {}), words = Object.entries(parsed(trajectory.words) || {});
  if (parts.length < 2 && !words.length) return null;
  const names = [...new Set([...parts, ...words].map(([name]) => name))].sort(), [value, said] = [new Map(parts), new Map(words)];
  return el("div", { class: "panel table rewards" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "part of the reward"), el("th", { class: "number" }, "value"), words.length ? el("th", {}, "in the judge's words") : null)),
    el("tbody", {}, names.map((name) => el("tr", {}, el("td", { class: "mono" }, visible(name)), el("td", { class: "number" }, value.has(name) ? number(value.get(name)) : ""), words.length ? el("td", { class: "said" }, visible(said.get(name))) : null)))));
}

/** Everything as JSON: shown as far as a page can, and as a file. */
function raw(found) {
  const text = JSON.stringify(found, null, 1), name = `${found.row.id.replaceAll("/", "_")}.json`;
  const save = el("button", { onclick: () => {
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  } }, "save as a file");
  const rest = text.length > RAW ? el("span", { class: "soft small" }, `the first ${RAW.toLocaleString("en")} of ${text.length.toLocaleString("en")} characters`) : null;
  return [el("div", { class: "bar" }, save, rest), el("pre", { class: "panel words" }, text.slice(0, RAW))];
}

function parsed(text) { try { return JSON.parse(text); } catch { return null; } }

function conversation(trajectory, replay) {
  const turns = trajectory.turns || [], addresses = addressesOf(trajectory), known = turns.some((turn) => turn.sample !== null), numbers = turns.some((turn) => turn.trainer.advantages.some((value) => value !== null));
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
    list.replaceChildren(...(chosen.tokens ? turns.map((turn, i) => tokenTurn(turn, i, scale, replay, addresses)) : messageTurns(trajectory, scale, replay)));
  }
  fill();
  return el("div", {}, el("div", { class: "bar" }, el("label", {}, "colour by", by), legend, tokens, note), list);
}

/** Whether the model said a message in this episode: answers that came with the task are shown to it as its own. */
const isAnswer = (message) => message?.role === "assistant" && !message.given;

/** The messages; an answer is shown as its tokens, and what the model was shown with the environment's own picture of it. */
function messageTurns(trajectory, scale, replay) {
  let answers = 0;
  const drawn = trajectory.messages.map((message, i) => {
    const asked = isAnswer(trajectory.messages[i + 1]) ? trajectory.turns[answers]?.picture : null;
    const last = i === trajectory.messages.length - 1 ? trajectory.picture : null;
    if (!isAnswer(message) || !trajectory.turns[answers]) return el("article", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("header", {}, el("b", {}, message.role), message.given ? el("span", {}, "given with the task") : null), el("div", { class: "shown" }, message.reasoning ? longText(message.reasoning, "reasoning") : null, imagesOf(message), longText(message.content || ""), callsOf(message), picture(asked || last)));
    const number = answers++, turn = trajectory.turns[number];
    return el("article", { class: `message assistant${turn.forked ? " forked" : ""}` }, turnHead(turn, number, replay),
      someOf(about(turn), scale), callsOf(message), infoOf(turn));
  });
  const ended = isAnswer(trajectory.messages.at(-1)) ? picture(trajectory.picture) : null;
  return ended ? [...drawn, el("article", { class: "message" }, el("header", {}, el("b", {}, "how it ended")), ended)] : drawn;
}

/** The pictures that a message shows the model, from the run's own files. */
function imagesOf(message) {
  return (message.pictures || []).map((address, i) => imageOf(address, message.images[i], message.picture_tokens[i]));
}

/** A picture that the model was shown, with the number of its tokens. */
function imageOf(address, name, tokens) {
  const counted = tokens ? `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}` : "in no prompt";
  const shown = address ? el("img", { class: "seen", src: address, alt: `picture ${name}`, title: name }) : el("p", { class: "soft" }, `the picture ${name} is missing or damaged`);
  return el("figure", { class: "shown-image" }, shown, el("figcaption", { class: "soft small" }, counted));
}

/** The tokens of a prompt, in which pictures stand in place of their own tokens. */
function promptOf(tokens, images, addresses) {
  const parts = [];
  let at = 0;
  for (const { start, tokens: count, image } of images || []) {
    if (start > at) parts.push(someOf(tokens.slice(at, start), null));
    parts.push(imageOf(addresses.get(image), image, count));
    at = start + count;
  }
  if (at < tokens.length || !parts.length) parts.push(someOf(tokens.slice(at), null));
  return parts;
}

/** The addresses of an episode's pictures, by the names of their files. */
function addressesOf(trajectory) {
  return new Map(trajectory.messages.flatMap((message) => (message.pictures || []).map((address, i) => [message.images[i], address])));
}

const FRAME = `<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"><meta http-equiv="x-dns-prefetch-control" content="off"><style>body{margin:6px;font:14px sans-serif;color:#22303c;background:#fff}svg,img{max-width:100%;max-height:calc(100vh - 12px)}</style>`;

/** An environment's picture, in a frame where no script runs, and from which nothing can be asked or opened. */
function picture(html) {
  return html ? el("iframe", { class: "picture", sandbox: "", referrerpolicy: "no-referrer", loading: "lazy", title: "the environment's picture", srcdoc: FRAME + html }) : null;
}

function tokenTurn(turn, number, scale, replay, addresses) {
  const prompt = turn.prompt.map((text, i) => ({ id: turn.prompt_ids[i], text, sampled: false, engine: null, old: null, updated: null, entropy: null, advantage: null, version: null }));
  return el("article", { class: `message assistant${turn.forked ? " forked" : ""}` }, turnHead(turn, number, replay), promptOf(prompt, turn.images, addresses), someOf(about(turn), scale), infoOf(turn));
}

/** A button that copies the command which goes on from a turn, and shows it. */
function copying(command) {
  const shown = el("code", { class: "command", hidden: true }, visible(command));
  const button = el("button", { class: "quiet", title: "Copy the command that goes on from this turn in another way, by a model or by hand", onclick: async () => {
    shown.hidden = false;
    try { await navigator.clipboard.writeText(command); button.textContent = "copied"; } catch { button.textContent = "copy this"; }
  } }, "go on from here");
  return el("span", {}, button, " ", shown);
}

function turnHead(turn, at, replay) {
  const facts = [turn.sample !== null ? `sample ${turn.sample}` : null, turn.forked ? "forked: a new sample begins here" : null, turn.parent !== (at ? at - 1 : null) && (turn.forked || !at) ? (turn.parent === null ? "begins anew" : `continues turn ${turn.parent}`) : null,
    turn.reward ? `reward ${number(turn.reward)}` : null, `${turn.token_ids.length} tokens, ${turn.prompt_ids.length} new before them`,
    `model ${duration(turn.generate_seconds)}`, `environment ${duration(turn.env_seconds)}`, turn.finish_reason !== "stop" ? `ended by ${turn.finish_reason}` : null];
  return el("header", {}, el("b", {}, `turn ${at}`), facts.filter(Boolean).map((text) => el("span", {}, text)), replay ? copying(`${replay} --turn ${at}`) : null);
}

function infoOf(turn) {
  const info = parsed(turn.info);
  return info && Object.keys(info).length ? el("details", {}, el("summary", { class: "soft small" }, "info"), longText(JSON.stringify(info, null, 1))) : null;
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

/** Tokens, of which many are shown only when they are asked for. */
function someOf(facts, scale) {
  let shown = 0;
  const words = el("div", { class: "words" }), more = el("button", { class: "small", onclick: () => next(20 * LONG) });
  function next(count) {
    const made = document.createDocumentFragment();
    for (const one of facts.slice(shown, shown + count)) made.append(tokenOf(one.text, one, scale));
    shown = Math.min(facts.length, shown + count);
    words.append(made);
    more.textContent = `${(facts.length - shown).toLocaleString("en")} more tokens`;
    more.hidden = shown === facts.length;
  }
  next(LONG);
  return more.hidden ? words : el("div", {}, words, more);
}

/** A text, whose end is shown only when it is asked for if it is long. */
function longText(text, kind = "") {
  const shown = el("pre", { class: `words ${kind}` }, visible(text.slice(0, LONG_TEXT)));
  if (text.length <= LONG_TEXT) return shown;
  const more = el("button", { class: "small", onclick: () => { shown.textContent = visible(text); more.remove(); } }, `${(text.length - LONG_TEXT).toLocaleString("en")} more characters`);
  return el("div", {}, shown, more);
}

function tokenOf(text, facts, scale) {
  const made = el("span", { class: `token${facts.sampled ? "" : " prompt"}` }, text === "" ? "∅" : visible(text));
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
  const values = turns.flatMap((turn) => about(turn).map(colouring.value)).filter((value) => value !== null && Number.isFinite(value));
  const dark = luminance(colourOf("--bg")) < 0.4, tone = dark ? 38 : 72;
  const most = values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
  const [least, largest] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  // A scale for logprobs is the same everywhere, unless answers are less likely than it reaches.
  const [low, high] = colouring.both ? [-most, most] : colouring.range ? [least, largest] : colouring.flip ? [Math.min(colouring.scale[0], Math.floor(least)), 0] : colouring.scale;
  const paint = (value) => {
    if (colouring.both) return `hsl(${value < 0 ? 12 : 150} 65% ${tone}% / ${Math.min(1, Math.abs(value) / most).toFixed(3)})`;
    const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 1;
    return `hsl(${colouring.hue} 70% ${tone}% / ${(colouring.flip ? 1 - share : colouring.range ? 0.15 + 0.85 * share : share).toFixed(3)})`;
  };
  return {
    low, high, paint, known: values.length > 0, same: least === largest ? least : null, title: colouring.title, shown: colouring.shown || ((value) => value),
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
  if (scale.same !== null && (scale.low !== 0 || scale.high !== 1)) return [`${number(scale.shown(scale.same))} for all tokens`];
  const canvas = el("canvas", { width: 120, height: 10 }), pen = canvas.getContext("2d");
  for (let x = 0; x < 120; x++) { pen.fillStyle = scale.paint(scale.low + ((scale.high - scale.low) * x) / 119); pen.fillRect(x, 0, 1, 10); }
  return [number(scale.shown(scale.low)), canvas, number(scale.shown(scale.high))];
}

/** The turns as dots of a tree: a line of calls goes on to the right, and a turn that branches off begins a row. */
function tree(trajectory) {
  const turns = trajectory.turns || [], followers = turns.map(() => []), roots = [];
  turns.forEach((turn, i) => (turn.parent === null ? roots : followers[turn.parent]).push(i));
  const places = new Map(), rows = [];
  const open = roots.toReversed().map((i) => [i, 0, null]);  // [turn, depth, the row that it goes on]
  while (open.length) {
    const [i, depth, row] = open.pop(), own = row ?? rows.push(0) - 1;
    places.set(i, [depth, own]);
    followers[i].toReversed().forEach((next, at, all) => open.push([next, depth + 1, at === all.length - 1 ? own : null]));
  }
  const deepest = Math.max(0, ...[...places.values()].map(([depth]) => depth)), step = Math.max(10, Math.min(44, 900 / (deepest + 1)));
  const at = (i) => { const [depth, row] = places.get(i); return [54 + depth * step, 22 + row * 34]; };
  const width = Math.max(260, 84 + deepest * step), height = 44 + (rows.length - 1) * 34;
  const branches = rows.length - 1, said = branches <= 0 ? "One line: each turn continues the tokens of the one before" : roots.length > 1 ? `${rows.length} lines of calls, ${roots.length} of which begin anew` : `${rows.length} lines of calls from one beginning`;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, style: { "max-width": `${width}px`, width: "100%" }, role: "img", "aria-label": said });
  turns.forEach((turn, i) => {
    const [x, y] = at(i), [x0, y0] = turn.parent === null ? [x - 30, y] : at(turn.parent);
    const off = turn.parent === null ? i !== roots[0] : y !== y0;
    svg.append(el("path", { d: `M${x0} ${y0}C${x0 + step / 2} ${y0} ${x - step / 2} ${y} ${x} ${y}`, fill: "none", stroke: off ? "var(--warn)" : "var(--soft)", "stroke-width": 1.6, "stroke-dasharray": turn.parent === null ? "3 3" : null }));
  });
  turns.forEach((turn, i) => {
    const [x, y] = at(i), kind = parsed(turn.info)?.call_kind;
    const dot = el("circle", { cx: x, cy: y, r: 6, fill: turn.sample === null ? "var(--line)" : "var(--accent)", stroke: "var(--panel)", "stroke-width": 2 });
    dot.addEventListener("pointermove", (event) => showTip(event, `turn ${i}`, [["after", turn.parent === null ? "nothing" : `turn ${turn.parent}`], ...(kind ? [["call", kind]] : []), ["sample", turn.sample === null ? "none" : String(turn.sample)], ["reward", number(turn.reward)], ["tokens", String(turn.token_ids.length)]]));
    dot.addEventListener("pointerleave", hideTip);
    svg.append(dot);
    if (step >= 20) svg.append(el("text", { class: "tick", x, y: y + 17, "text-anchor": "middle" }, String(i)));
  });
  return el("section", { class: "panel" }, el("h3", {}, said), svg, el("p", { class: "soft small" }, "Each dot is a turn, by its number; a row of tokens that is trained on by itself begins where a line branches off."));
}

function samplesTable(samples) {
  if (!samples.length) return el("p", { class: "empty" }, "No training sample was made of it.");
  const columns = ["step", "sample", "first_turn", "last_turn", "tokens", "loss_tokens", "advantage", "weight"];
  return el("div", { class: "panel table", style: { "margin-top": "12px" } }, el("table", {}, el("thead", {}, el("tr", {}, columns.map((name) => el("th", { class: "number" }, name.replace("_", " "))))), el("tbody", {}, samples.map((one) => el("tr", {}, columns.map((name) => el("td", { class: "number" }, number(one[name]))))))));
}
