// The page Run: what each chosen run is doing, and its curves, alone or as differences from the first one.

import { chart } from "./chart.js";
import { ask, metrics } from "./data.js";
import { add, duration, el, lasting, number, percent } from "./dom.js";
import { liveState } from "./live.js";

const FIRST = ["reward", "success", "entropy", "mixed_groups", "health/effective_sample_size", "health/ratio_p99", "staleness/mean", "logprob_gap_mean", "turns", "sampled_tokens", "truncated", "grad_norm", "kl", "tokens_per_second", "seconds"];
const settings = { smooth: 0, log: false, zoom: null, filter: "", every: false, differences: false };
let meanings = null;

export async function showRun(room, context) {
  meanings ||= Object.assign({}, ...Object.values(await ask("meanings")));
  const runs = context.chosen;
  let rows = new Map(await Promise.all(runs.map(async (run) => [run.name, await metrics(run.name)])));
  const statuses = el("div", { class: "statuses" }), charts = el("div", { class: "grid" }), warnings = el("div", {});
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, "aria-label": "smoothing", oninput: (event) => { settings.smooth = Number(event.target.value); drawCharts(); } });
  const log = toggle("log", () => settings.log, (on) => { settings.log = on; });
  const every = toggle("all metrics", () => settings.every, (on) => { settings.every = on; });
  const differences = runs.length > 1 ? toggle(`difference from ${runs[0].name}`, () => settings.differences, (on) => { settings.differences = on; }) : null;
  const whole = el("button", { onclick: () => zoom(null) }, "whole range");
  const search = el("input", { type: "search", placeholder: "metric …  /", value: settings.filter, "aria-label": "metrics whose name contains", oninput: (event) => { settings.filter = event.target.value.toLowerCase(); drawCharts(); } });
  add(room, statuses, warnings, el("div", { class: "bar" }, search, el("label", {}, "smooth", slider), log, every, differences, whole), charts);

  function toggle(label, read, write) {
    const made = el("button", { "aria-pressed": String(read()), onclick: () => { write(!read()); made.setAttribute("aria-pressed", String(read())); drawCharts(); } }, label);
    return made;
  }
  function zoom(range) { settings.zoom = range; drawCharts(); }

  function names() {
    const found = new Set([...rows.values()].flat().flatMap((row) => Object.keys(row)));
    found.delete("step");
    const evaluations = [...found].filter((name) => /^eval\/.*success$/.test(name));
    const envs = [...found].filter((name) => /^envs\/.+\/(success|reward)$/.test(name));
    const parts = [...found].filter((name) => /^reward\//.test(name));
    const leading = [...FIRST.slice(0, 2), ...evaluations, ...envs, ...(parts.length > 1 ? parts : []), ...FIRST.slice(2)].filter((name) => found.has(name));
    const rest = [...found].filter((name) => !leading.includes(name) && !/_(low|high|error)$/.test(name)).sort();
    if (settings.filter) return [...leading, ...rest].filter((name) => name.toLowerCase().includes(settings.filter));
    return settings.every ? [...leading, ...rest] : leading;
  }

  function seriesOf(name) {
    const made = runs.map((run) => {
      const own = rows.get(run.name).filter((row) => typeof row[name] === "number");
      const band = own.filter((row) => typeof row[`${name}_low`] === "number").map((row) => [row.step, row[`${name}_low`], row[`${name}_high`]]);
      return { name: run.name, colour: context.colour(run.name), points: own.map((row) => [row.step, row[name]]), band, dots: name.startsWith("eval/") };
    });
    if (!settings.differences || runs.length < 2) return made.filter((one) => one.points.length);
    const base = new Map(made[0].points);
    return made.slice(1).map((one) => ({ ...one, name: `${one.name} − ${made[0].name}`, band: [], points: one.points.filter(([x]) => base.has(x)).map(([x, y]) => [x, y - base.get(x)]) })).filter((one) => one.points.length);
  }

  /** What is said above a chart: the last values, or the mean difference with its 95 % interval. */
  function head(series) {
    if (!settings.differences || runs.length < 2) return series.map((one) => said(one, number(one.points.at(-1)[1], 4)));
    return series.map((one) => {
      const values = one.points.filter(([x]) => !settings.zoom || (x >= settings.zoom[0] && x <= settings.zoom[1])).map(([, y]) => y);
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      const spread = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, values.length - 1) / values.length);
      return said(one, `mean ${number(mean)} ± ${number(1.96 * spread)}`);
    });
  }
  const said = (one, text) => el("span", { style: runs.length > 1 ? { color: one.colour, "margin-left": "10px" } : {} }, text);

  function drawCharts() {
    whole.hidden = settings.zoom === null;
    const made = names().map((name) => [name, seriesOf(name)]).filter(([, series]) => series.length);
    const existing = new Map([...charts.children].map((child) => [child.dataset.metric, child]));
    charts.replaceChildren(...made.map(([name, series]) => {
      const value = el("span", { class: "value" }, head(series));
      const known = existing.get(name);
      if (known) { known.querySelector(".value").replaceWith(value); return known; }
      return el("section", { class: "panel chart", "data-metric": name }, el("div", { class: "head" }, el("h3", { title: meanings[name] || "" }, name), value), el("div", { class: "plot" }));
    }));
    for (const [name, series] of made) {
      const holder = [...charts.children].find((child) => child.dataset.metric === name).querySelector(".plot");
      chart(holder, series, { ...settings, onzoom: zoom, label: `${name} by step` });
    }
    if (!made.length) charts.replaceChildren(el("p", { class: "empty" }, settings.filter ? "No metric has such a name." : "No step is finished yet. This page fills by itself."));
  }

  function drawStatuses() {
    statuses.replaceChildren(...context.chosen.map((run) => statusOf(run, rows.get(run.name) || [], context)));
    const texts = context.chosen.flatMap((run) => (run.warnings || []).map((text) => `${run.name}: ${text}`));
    warnings.replaceChildren(...texts.map((text) => el("p", { class: "panel warning" }, text)));
  }

  const clock = setInterval(drawStatuses, 1000);
  return {
    attached() { drawStatuses(); drawCharts(); },
    leave() { clearInterval(clock); },
    resized: drawCharts,
    async news(run) {
      const had = rows.get(run.name)?.length;
      if (run.rows !== had) { rows = new Map([...rows, [run.name, await metrics(run.name)]]); drawCharts(); }
      drawStatuses();
    },
    key(key) {
      if (key === "l") log.click();
      else if (key === "0") zoom(null);
      else if (key === "/") search.focus();
      else return false;
      return true;
    },
  };
}

function statusOf(run, rows, context) {
  const last = rows.findLast((row) => "reward" in row) || {};
  const done = rows.reduce((most, row) => ("reward" in row || "loss" in row ? Math.max(most, row.step + 1) : most), 0);
  const since = run.since ? (Date.now() - Date.parse(run.since)) / 1000 : null;
  const ended = run.summary && Object.keys(run.summary).length > 0;
  const doing = run.live ? (run.phase ? `step ${run.step}: ${run.phase} for ${lasting(since)}` : "starting") : ended ? "ended" : run.phase ? `stopped in step ${run.step}, ${run.phase}` : "not begun";
  const facts = [["steps", run.steps ? `${done} of ${run.steps}` : String(done)], ["reward", number(last.reward)], ["success", percent(last.success)]];
  if (last.tokens_per_second) facts.push(["tokens/s", number(last.tokens_per_second)]);
  for (const name of new Set(rows.flatMap(Object.keys).filter((one) => /^eval\/([^/]+\/)?success$/.test(one)))) {
    const values = rows.filter((row) => name in row).map((row) => percent(row[name]));
    facts.push([name === "eval/success" ? "held out" : name.split("/")[1], values.length > 1 ? `${values[0]} → ${values.at(-1)}` : values[0]]);
  }
  if (run.live && run.steps && done && last.seconds) facts.push(["left", `about ${duration((run.steps - done) * last.seconds)}`]);
  return el("section", { class: "panel status", "data-run": run.name },
    el("h3", {}, el("i", { class: `dot${run.live ? " live" : ""}`, style: { background: context.colour(run.name) } }), run.name, el("span", { class: "soft small" }, doing)),
    el("div", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("span", {}, name), el("b", {}, value)))),
    liveState(run),
    run.steps ? el("progress", { max: run.steps, value: Math.min(done, run.steps), "aria-label": "steps done" }) : null);
}
