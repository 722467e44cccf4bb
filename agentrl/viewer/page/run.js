// The page Run: what each chosen run is doing, and its curves, alone or as differences from the first one.

import { chart } from "./chart.js";
import { ask, metrics } from "./data.js";
import { add, duration, el, lasting, middle, number, percent, visible } from "./dom.js";
import { liveState } from "./live.js";

const FIRST = ["reward", "success", "preference_loss", "accuracy", "margin", "demonstrations/success", "entropy", "mixed_groups", "health/effective_sample_size", "health/ratio_p99", "staleness/mean", "logprob_gap_mean", "turns", "sampled_tokens", "truncated", "grad_norm", "kl", "tokens_per_second", "seconds"];
const [FEW_METRICS, FEW_WARNINGS, FEW_RUNS, OTHER] = [24, 3, 3, "Others"];
const settings = { smooth: 0, log: false, zoom: null, filter: "", every: false, differences: false, warnings: null };
let meanings = null;

/** What a metric means, and the topic that it belongs to; names in the table may have placeholders. */
function meaningsOf(topics) {
  const forms = Object.entries(topics).flatMap(([topic, names]) => Object.entries(names).map(([name, meaning]) => {
    const pattern = name.split(/(<\w+>)/).map((part) => (part === "<part>" ? ".+" : /^<\w+>$/.test(part) ? "[^/]+" : part.replace(/[^\w/]/g, "\\$&"))).join("");
    return { name, topic: topic.split(":")[0].split(" (")[0], meaning, pattern: new RegExp(`^${pattern}$`) };
  }));
  const found = new Map();
  return (name) => {
    if (!found.has(name)) found.set(name, forms.find((one) => one.name === name) || forms.find((one) => one.pattern.test(name)) || { topic: OTHER, meaning: "" });
    return found.get(name);
  };
}

export async function showRun(room, context) {
  meanings ||= meaningsOf(await ask("meanings"));
  const runs = context.chosen;
  const stamps = new Map(runs.map((run) => [run.name, run.stamp]));
  let rows = new Map(await Promise.all(runs.map(async (run) => [run.name, await metrics(run.name)])));
  const statuses = el("div", { class: "statuses" }), charts = el("div", {}), warnings = el("div", {});
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, "aria-label": "smoothing", oninput: (event) => { settings.smooth = Number(event.target.value); drawCharts(); } });
  const log = toggle("log", () => settings.log, (on) => { settings.log = on; });
  const every = toggle("all metrics", () => settings.every, (on) => { settings.every = on; });
  const differences = runs.length > 1 ? toggle(`difference from ${middle(runs[0].name, 24)}`, () => settings.differences, (on) => { settings.differences = on; }) : null;
  const whole = el("button", { onclick: () => zoom(null) }, "whole range");
  const search = el("input", { type: "search", placeholder: "metric …  /", value: settings.filter, "aria-label": "metrics whose name contains", oninput: (event) => { settings.filter = event.target.value.toLowerCase(); drawCharts(); } });
  add(room, el("h1", { class: "unseen" }, runs.map((run) => run.name).join(", ")), statuses, warnings, el("div", { class: "bar" }, search, el("label", {}, "smooth", slider), log, every, differences, whole), charts);

  function toggle(label, read, write) {
    const made = el("button", { "aria-pressed": String(read()), onclick: () => { write(!read()); made.setAttribute("aria-pressed", String(read())); drawCharts(); } }, label);
    return made;
  }
  function zoom(range) { settings.zoom = range; drawCharts(); }

  /** The metrics to show, as sections: what leads has no title, the others stand by topic. */
  function sections() {
    const found = new Set();
    for (const row of [...rows.values()].flat()) for (const name of Object.keys(row)) found.add(name);
    found.delete("step");
    const evaluations = [...found].filter((name) => /^eval\/.*(success|accuracy)$/.test(name));
    const envs = [...found].filter((name) => /^envs\/.+\/(success|reward)$/.test(name));
    const parts = [...found].filter((name) => /^reward\//.test(name));
    const wanted = (name) => !settings.filter || name.toLowerCase().includes(settings.filter);
    const alarming = context.chosen.flatMap((run) => (run.warnings || []).flatMap(({ metrics: about }) => about)).filter((name) => ![...FIRST, ...evaluations].includes(name));
    const leading = [...new Set([...FIRST.slice(0, 2), ...evaluations, ...envs, ...(parts.length > 1 ? parts : []), ...FIRST.slice(2), ...alarming])].filter((name) => found.has(name) && wanted(name));
    const topics = new Map();
    const rest = [...found].filter((name) => !leading.includes(name) && wanted(name) && !/_(low|high|error)$/.test(name)).sort();
    if (settings.every || settings.filter || found.size <= FEW_METRICS) for (const name of rest) { const { topic } = meanings(name); topics.set(topic, [...(topics.get(topic) || []), name]); }
    return [[null, leading], ...[...topics].sort(([a], [b]) => (a === OTHER) - (b === OTHER))].filter(([, names]) => names.length);
  }

  function seriesOf(name) {
    const made = runs.map((run) => {
      const own = rows.get(run.name).filter((row) => Object.hasOwn(row, name) && typeof row[name] === "number");
      const band = own.filter((row) => typeof row[`${name}_low`] === "number").map((row) => [row.step, row[`${name}_low`], row[`${name}_high`]]);
      return { name: run.name, run: run.name, colour: context.colour(run.name), dash: context.dash(run.name), points: own.map((row) => [row.step, row[name]]), band, dots: name.startsWith("eval/") };
    });
    if (!settings.differences || runs.length < 2) return made.filter((one) => one.points.length);
    const base = new Map(made[0].points);
    return made.slice(1).map((one) => ({ ...one, name: `${middle(one.name, 24)} − ${middle(made[0].name, 24)}`, band: [], points: one.points.filter(([x]) => base.has(x)).map(([x, y]) => [x, y - base.get(x)]) })).filter((one) => one.points.length);
  }

  /** What is said of a chart's lines: the last values, or the mean difference with its 95 % interval. */
  function legend(series) {
    const said = (one, text) => el("span", { title: one.name }, runs.length > 1 ? el("i", { class: "dot", style: { background: one.colour } }) : null, text);
    if (!settings.differences || runs.length < 2) return series.map((one) => said(one, number(one.points.at(-1)[1], 4)));
    return series.map((one) => {
      const values = one.points.filter(([x]) => !settings.zoom || (x >= settings.zoom[0] && x <= settings.zoom[1])).map(([, y]) => y);
      if (!values.length) return said(one, "no step of both");
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      const spread = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, values.length - 1) / values.length);
      return said(one, values.length > 1 ? `mean ${number(mean)} ± ${number(1.96 * spread)}` : `${number(mean)}, one step`);
    });
  }

  // Only charts that are in sight are drawn: with all metrics there are some 150.
  const seen = new IntersectionObserver((changes) => {
    for (const { target, isIntersecting } of changes) { target.inSight = isIntersecting; if (isIntersecting) drawOne(target); }
  }, { rootMargin: "300px" });

  function drawOne(panel) {
    if (!panel.stale) return;
    panel.stale = false;
    const { metric } = panel.dataset, series = seriesOf(metric);
    panel.querySelector(".values").replaceChildren(...legend(series));
    chart(panel.querySelector(".plot"), series, { ...settings, onzoom: zoom, onpick: episodesOf(metric), alarms: alarmsOn(metric), label: `${metric} by step` });
  }

  /** Where a click on a point of a metric leads: the episodes of that step, or of that evaluation. */
  function episodesOf(metric) {
    if (metric.startsWith("demonstrations/")) return null;
    return (step, run) => context.go("episodes", { step, evaluation: evaluationOf(metric) }, run ? [run] : undefined);
  }

  /** The warnings that a metric's chart shows; those of a run that did not say what they are about stand at the reward. */
  function alarmsOn(metric) {
    const here = ({ metrics: about }) => (about.length ? about.includes(metric) : metric === "reward");
    return context.chosen.flatMap((run) => (run.warnings || []).filter(here).map(({ step, text }) => ({ step, text, run: run.name })));
  }

  function panelOf(name) {
    const { meaning } = meanings(name);
    const made = el("section", { class: "panel chart", "data-metric": name }, el("div", { class: "head" }, el("h3", {}, name), el("div", { class: "values" })), el("p", { class: "meaning", title: meaning }, meaning), el("div", { class: "plot" }));
    seen.observe(made);
    return made;
  }

  function drawCharts() {
    whole.hidden = settings.zoom === null;
    const existing = new Map([...charts.querySelectorAll(".chart")].map((panel) => [panel.dataset.metric, panel]));
    const drawable = (name) => [...rows.values()].some((own) => own.some((row) => Object.hasOwn(row, name) && typeof row[name] === "number"));
    const shown = sections().map(([topic, names]) => [topic, names.filter(drawable).map((name) => existing.get(name) || panelOf(name))]).filter(([, panels]) => panels.length);
    const arranged = shown.map(([topic, panels]) => [topic ? el("h2", {}, topic) : null, el("div", { class: "grid" }, panels)]);
    const open = document.activeElement;  // moving a chart takes the focus from it
    if (shown.length) charts.replaceChildren(...arranged.flat().filter(Boolean));
    else charts.replaceChildren(el("p", { class: "empty" }, settings.filter ? "No metric has such a name." : runs.some((run) => run.live) ? "No step is finished yet. This page fills by itself." : "No step was finished, and no process of the run lives on this machine."));
    if (open !== document.activeElement && open?.isConnected) open.focus({ preventScroll: true });
    for (const panel of charts.querySelectorAll(".chart")) { panel.stale = true; if (panel.inSight) drawOne(panel); }
  }

  function drawStatuses() {
    statuses.replaceChildren(...context.chosen.map((run) => statusOf(run, rows.get(run.name) || [], context)));
  }

  function drawWarnings() {
    const texts = context.chosen.flatMap((run) => (run.warnings || []).map(({ step, text, metrics: about }) => el("li", {}, runs.length > 1 ? el("b", {}, `${middle(run.name)}: `) : null, visible(text), " ",
      el("a", { href: context.address("episodes", { step, evaluation: evaluationOf(about[0] || "") }, [run.name]) }, "its episodes"))));
    const open = settings.warnings ?? texts.length <= FEW_WARNINGS;
    warnings.replaceChildren(...(texts.length ? [el("details", { class: "panel warning", open, ontoggle: (event) => { settings.warnings = event.target.open === (texts.length <= FEW_WARNINGS) ? null : event.target.open; } },
      el("summary", {}, texts.length === 1 ? "1 warning" : `${texts.length} warnings`), el("ul", {}, texts))] : []));
    warnings.said = texts.length;
  }

  const clock = setInterval(() => { if (context.chosen.some((run) => run.live)) drawStatuses(); }, 1000);
  return {
    attached() { drawStatuses(); drawWarnings(); drawCharts(); },
    leave() { clearInterval(clock); seen.disconnect(); },
    resized: drawCharts,
    async news(run) {
      if (run.stamp !== stamps.get(run.name)) { stamps.set(run.name, run.stamp); rows = new Map([...rows, [run.name, await metrics(run.name)]]); drawCharts(); }
      drawStatuses();
      if (warnings.said !== context.chosen.reduce((sum, one) => sum + (one.warnings || []).length, 0)) drawWarnings();
    },
    key(key) {
      if (key === "l") log.click();
      else if (key === "a") every.click();
      else if (key === "d") differences?.click();
      else if (key === "0") zoom(null);
      else if (key === "/") search.focus();
      else return false;
      return true;
    },
  };
}

/** The evaluation that a metric is of; nothing for metrics of steps. */
function evaluationOf(metric) {
  const [kind, of, ...rest] = metric.split("/");
  return kind !== "eval" ? "" : rest.length && !["agents", "envs"].includes(of) ? of : "held_out";
}

function statusOf(run, rows, context) {
  const trained = rows.filter((row) => "reward" in row || "loss" in row), last = rows.findLast((row) => "reward" in row);
  const done = trained.reduce((most, row) => Math.max(most, row.step + 1), 0);
  const since = run.since ? (Date.now() - Date.parse(run.since)) / 1000 : null;
  const how = { completed: "complete", stopped: "stopped", failed: "failed", killed: "killed" }[run.ended?.how];
  const ended = how || run.summary && Object.keys(run.summary).length > 0, played = run.phase || last;
  const doing = run.live ? (run.phase ? `step ${run.step}: ${run.phase} for ${lasting(since)}` : "no step has begun") : ended ? (how && how !== "complete" && run.phase ? `${how} in step ${run.step}, ${run.phase}` : how || "ended") : run.phase ? `stopped in step ${run.step}, ${run.phase}` : rows.length ? "not running" : "not running, nothing recorded";
  const few = context.chosen.length <= FEW_RUNS;  // else the charts would stand far below what is said of each run
  // `steps` is about steps with episodes: recipes that learn from files make as many as they need.
  const facts = [["steps", run.steps && played ? `${done} of ${run.steps}` : String(done)]];
  if (last) facts.push(["reward", number(last.reward)], ["success", percent(last.success)]);
  if (last?.tokens_per_second) facts.push(["tokens/s", number(last.tokens_per_second)]);
  for (const name of new Set(rows.flatMap(Object.keys).filter((one) => /^eval\/([^/]+\/)?success$|^eval\/preference_accuracy$|^demonstrations\/success$/.test(one)))) {
    const told = (row) => row[name.replace(/success$/, "failed")] ? `${percent(row[name])} (${row[name.replace(/success$/, "failed")]} failed)` : percent(row[name]);  // failed episodes are in no figure
    const values = rows.filter((row) => name in row).map(told), [kind, of] = name.split("/");
    facts.push([name === "eval/success" ? "held out" : of === "preference_accuracy" ? "pairs in order" : kind === "eval" ? of : "demonstrations", values.length > 1 ? `${values[0]} → ${values.at(-1)}` : values[0]]);
  }
  if (run.live && run.steps && done && last?.seconds) facts.push(["left", `about ${duration((run.steps - done) * last.seconds)}`]);
  return el("section", { class: "panel status", "data-run": run.name },
    el("h3", {}, el("i", { class: `dot${run.live ? " live" : ""}`, style: { background: context.colour(run.name) } }), el("b", { class: "name", title: run.name }, middle(run.name, 48)), el("span", { class: "soft small", title: run.ended?.why }, doing)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, value))))),
    few ? aboutOf(run) : null, liveState(run), few ? endOf(run.ended) : null,
    run.steps && played ? el("progress", { max: run.steps, value: Math.min(done, run.steps), "aria-label": `steps done of ${run.name}` }) : null);
}

/** When and where a run was played, from which commit, and what its owner has written of it. */
function aboutOf(run) {
  const { began, last, launches, host, commit, changed, version, notes, tags } = run.about, facts = [];
  if (began) facts.push(["started", new Date(began).toLocaleString("sv-SE").slice(0, 16)]);
  if (began && (run.live || last)) facts.push(["duration", `${duration(Math.max(0, ((run.live ? Date.now() : Date.parse(last)) - Date.parse(began)) / 1000))}${launches > 1 ? `, ${launches} launches` : ""}`]);
  if (host) facts.push(["host", host]);
  if (commit) facts.push(["commit", el("span", { class: "mono", title: commit }, commit.slice(0, 10), changed ? " + changes" : "")]);
  if (version) facts.push(["agentrl", version]);
  if (tags.length) facts.push(["tags", tags.map((tag) => [el("span", { class: "badge" }, visible(tag)), " "])]);
  if (!facts.length && !notes) return null;
  return [el("dl", { class: "facts about", "aria-label": "about the run" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))), notes ? el("p", { class: "notes" }, visible(notes)) : null];
}

/** Why a run ended before its work was done, and the command that goes on. */
function endOf(ended) {
  if (!ended || ended.how === "completed") return null;
  return el("div", { class: "panel warning", "aria-label": "why the run ended" }, el("p", {}, ended.error ? el("b", {}, `${ended.error}: `) : null, visible(ended.why)),
    ended.resume ? el("p", {}, ended.checkpoint === null ? "It begins again with " : `It goes on after ${ended.checkpoint} steps with `, el("code", {}, ended.resume)) : null);
}
