// The page Held out: what each held-out task did in all evaluations: first solved, best, worst, and now.

import { ask } from "./data.js";
import { add, el, number, percent, visible } from "./dom.js";

const PAGE = 100;
const COLUMNS = [["task", "task"], ["first", "first solved", "number"], ["best", "best", "number"], ["worst", "worst", "number"], ["last", "newest", "number wide"], ["change", "change", "number wide"]];
const KINDS = { "": "all", lost: "solved before, and not now", never: "never solved", gained: "solved now, and not at first", always: "always solved" };

export async function showHeldOut(room, context) {
  const { name: run, live } = context.chosen[0], given = Object.fromEntries([...context.place].filter(([name]) => name !== "runs"));
  const query = { sort: "task", descending: "false", offset: 0, ...given };
  const found = await ask("evaluations", { run, ...query, limit: PAGE });
  const change = (changes) => context.go("heldout", { ...given, offset: "", ...changes });
  if (!found.names.length) {
    add(room, el("p", { class: "empty" }, live ? "No evaluation has ended yet. Load this page again when one has." : "No episode of an evaluation was kept: this run has no held-out tasks (evaluation.tasks) and no suites (evaluation.suites), or its recipe learns from files."));
    return {};
  }
  const which = el("select", { "aria-label": "evaluation", onchange: (event) => context.go("heldout", { name: event.target.value }) }, found.names.map(([name]) => el("option", { value: name, selected: name === found.name }, name.replaceAll("_", " "))));
  const show = el("select", { "aria-label": "tasks", onchange: (event) => change({ show: event.target.value }) }, Object.entries(KINDS).map(([value, title]) => el("option", { value, selected: (given.show || "") === value }, `${title} (${found.counts[value || "all"]})`)));
  const search = el("input", { type: "search", placeholder: "task …  /", value: given.text || "", "aria-label": "tasks whose name contains", onchange: (event) => change({ text: event.target.value }) });
  const table = el("table", { "aria-label": "held-out tasks" }, el("thead", {}, el("tr", {}, COLUMNS.map(([column, title, kind], i) => {
    const sorted = query.sort === column, up = sorted && query.descending !== "true";
    const head = el("th", { class: kind || "", "aria-sort": sorted ? (up ? "ascending" : "descending") : null }, el("button", { onclick: () => change({ sort: column, descending: String(up) }) }, title, sorted ? (up ? " ↑" : " ↓") : ""));
    return i ? head : [head, el("th", {}, "evaluations, by steps before")];
  }))), el("tbody", {},
    el("tr", { class: "means" }, el("td", { class: "soft" }, "all tasks"), el("td", {}, el("div", { class: "cells" }, found.columns.map((one) => headOf(one, found, context)))), el("td"), el("td"), el("td"), el("td", { class: "wide" }), el("td", { class: "wide" })),
    found.tasks.map((task) => rowOf(task, found, context))));
  const from = Number(query.offset), turn = (to) => context.go("heldout", { ...given, offset: to || "" });
  add(room, el("h1", { class: "unseen" }, `Held-out tasks of ${run}`),
    el("p", { class: "lead" }, sentence(found)),
    el("div", { class: "bar" }, which, el("label", {}, "show", show), search, el("a", { href: context.address("episodes", { evaluation: found.name }) }, "all its episodes")),
    found.tasks.length ? el("div", { class: "panel table heldout", tabindex: 0, role: "region", "aria-label": "held-out tasks" }, table) : el("p", { class: "empty" }, "No task is like this."),
    el("div", { class: "bar", hidden: !found.total, style: { "margin-top": "10px" } },
      el("span", { class: "soft", id: "total" }, `${(from + 1).toLocaleString("en")} to ${(from + found.tasks.length).toLocaleString("en")} of ${found.total.toLocaleString("en")}`),
      el("button", { disabled: from === 0, onclick: () => turn(Math.max(0, from - PAGE)) }, "previous"),
      el("button", { disabled: from + PAGE >= found.total, onclick: () => turn(from + PAGE) }, "next")));
  const stamp = context.chosen[0].stamp, fresh = el("button", { hidden: true, onclick: () => context.go("heldout", given, undefined, true) }, "new results: show them");
  room.append(fresh);
  return {
    key(key) { if (key !== "/") return false; search.focus(); return true; },
    news(now) { if (now.name === run && now.stamp !== stamp) fresh.hidden = false; },
  };
}

function sentence({ counts, columns }) {
  const [first, last] = [columns[0], columns.at(-1)], count = (one) => one.toLocaleString("en");
  if (first.success === null && last.success === null) return `${count(counts.all)} tasks; neither environment nor reward says which episodes succeeded, so scores are compared.`;
  if (columns.length === 1) return `${count(last.solved)} of ${count(counts.all)} tasks were solved after ${last.step} steps.`;
  return `Of ${count(counts.all)} tasks, ${count(first.solved)} ${first.solved === 1 ? "was" : "were"} solved after ${first.step} steps and ${count(last.solved)} after ${last.step}; ${count(counts.lost)} ${counts.lost === 1 ? "that was solved before is" : "that were solved before are"} not any more, and ${count(counts.never)} never ${counts.never === 1 ? "was" : "were"}.`;
}

function headOf(one, found, context) {
  const said = `after ${one.step} steps: ${one.success === null ? `mean score ${number(one.score)}` : `${percent(one.success)} succeeded`}${one.failed ? `, ${one.failed} episodes failed` : ""}`;
  return el("a", { class: "cell head", title: said, "aria-label": said, href: context.address("episodes", { evaluation: found.name, step: one.step, sort: "score", descending: "false" }) }, String(one.step));
}

function rowOf(task, found, context) {
  const value = (pair) => (pair === null ? "–" : [number(pair[0]), " ", el("span", { class: "soft small" }, `after ${pair[1]}`)]);
  return el("tr", {}, el("td", { class: "mono" }, el("span", { class: "id", title: `${task.task}: ${task.env}` }, visible(task.task))),
    el("td", {}, el("div", { class: "cells" }, task.cells.map((cell, i) => cellOf(cell, task, found, found.columns[i].step, context)))),
    el("td", { class: "number" }, task.first === null ? "–" : `after ${task.first}`), el("td", { class: "number" }, value(task.best)), el("td", { class: "number" }, value(task.worst)),
    el("td", { class: "number wide" }, number(task.last)), el("td", { class: "number wide" }, task.change === null ? "–" : `${task.change > 0 ? "+" : ""}${number(task.change)}`));
}

/** What a task did in one evaluation: solved or not, or its score on the scale of all; a link to the episode. */
function cellOf(cell, task, found, step, context) {
  if (cell === null) return el("span", { class: "cell none", title: `after ${step} steps: not played` }, "·");
  const [success, score, episodes, failed, id] = cell;
  const kind = failed === episodes ? "failed" : success === null ? "scored" : success >= 0.5 ? "solved" : "unsolved";
  const said = `${task.task} after ${step} steps: ${failed === episodes ? "failed" : `${success === null ? "" : episodes > 1 ? `${percent(success)} of ${episodes} succeeded, ` : success ? "succeeded, " : "did not succeed, "}score ${number(score)}`}`;
  const share = found.high > found.low && score !== null ? (score - found.low) / (found.high - found.low) : 1;
  const to = episodes > 1 ? context.address("episodes", { evaluation: found.name, step, text: `${task.task}/` }) : context.address("episode", { id, step });
  return el("a", { class: `cell ${kind}`, href: to, title: said, "aria-label": said, style: kind === "scored" ? { "--share": share.toFixed(3) } : {} }, { failed: "!", solved: "✓", unsolved: "×", scored: "" }[kind]);
}
