// What a run that goes on is doing: what waits for what, and its workers. From live.json, by way of the news.

import { el, lasting } from "./dom.js";

const SILENT = 15, LONG = 10;
const ROLES = { env: "environments", reward: "rewards" };
const LAYERS = { engine: "the engine", environment: "environments", reward: "rewards", data: "data" };
const seen = new Map();

const counted = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** A list of what goes on in a live run; nothing if its process does not say it. */
export function liveState(run) {
  if (!run.live || !run.now) return null;
  const { workers, waits, notices, underway } = run.now;
  const rows = [["now", sentence(run)]];
  const calls = waiting(waits);
  if (calls) rows.push(["waiting", calls]);
  if (underway) rows.push(["episodes", slots(underway)]);
  if (workers.length) rows.push(["workers", workers.map(crew)]);
  const longest = (underway?.longest || []).filter(([, , seconds]) => seconds >= LONG);
  if (longest.length) rows.push(["longest", longest.map(([task, env, seconds]) => `${task} (${env}) for ${lasting(seconds)}`).join("; ")]);
  const failures = Object.entries(underway?.failures || {});
  if (failures.length) rows.push(["failures", failures.map(([layer, count]) => `${layer} ${count.toLocaleString("en")}`).join(", ")]);
  for (const text of notices) rows.push(["outside", el("span", { class: "outside" }, text)]);
  const silence = silentFor(run);
  if (silence > SILENT) rows.push(["silent", el("span", { class: "outside" }, `for ${lasting(silence)}: this is what the run said last`)]);
  return el("dl", { class: "now", "aria-label": "what the run is doing" }, rows.flatMap(([name, what]) => [el("dt", {}, name), el("dd", {}, what)]));
}

/** What waits for what, by the phase of the run's loop. */
function sentence({ phase, now }) {
  const play = now.underway, groups = play ? `${play.ready} of ${counted(play.wanted, "group is", "groups are")} ready` : null;
  if (!phase) return "No step has begun: the run starts its workers, or imitates demonstrations first.";
  if (phase === "rollout") return groups ? `The trainer waits for episodes: ${groups}.` : "The trainer waits for episodes.";
  if (phase === "train" && play?.slots) return `The trainer works, and episodes of later steps are played meanwhile: ${groups}.`;
  if (phase === "train") return play?.ready ? `The trainer works; for the next step ${groups}, and further episodes wait for its new weights.` : "The trainer works; episodes wait for its new weights.";
  if (phase === "weights") return "Trainer and episodes wait until the engines have the new weights.";
  if (phase === "evaluation") return "The trainer waits for an evaluation.";
  if (phase === "checkpoint") return "The next step waits until the state is copied for a checkpoint.";
  if (phase === "record") return "The next step waits until this one is written down.";
  return `The run is in the phase ${phase}.`;
}

/** How many calls wait for an answer, by whom they wait for; those that load weights are in the sentence. */
function waiting(waits) {
  const layers = new Map();
  for (const { layer, phase, count, longest } of waits) {
    if (phase === "update_weights" || phase.includes(".")) continue;
    const known = layers.get(layer) || [0, 0];
    layers.set(layer, [known[0] + count, Math.max(known[1], longest)]);
  }
  const parts = [...layers].map(([layer, [count, longest]], i) => {
    const calls = i ? count.toLocaleString("en") : counted(count, "call waits", "calls wait");
    return `${calls} for ${LAYERS[layer]}${longest > LONG ? ` (up to ${lasting(longest)})` : ""}`;
  });
  return parts.join(", ");
}

function slots({ slots: taken, slots_limit: limit, queued }) {
  const more = queued ? `; ${counted(queued, "episode waits", "episodes wait")} for one` : "";
  return `${taken.toLocaleString("en")} of ${counted(limit, "slot", "slots")} taken${more}`;
}

function crew({ role, alive, count, restarts }) {
  const text = `${ROLES[role] || role} ${alive} of ${count}${restarts ? `, ${counted(restarts, "restart", "restarts")}` : ""}`;
  return el("span", { class: `crew${alive < count ? " fewer" : ""}`, title: alive < count ? "some are not alive, or still start" : "all are alive" }, el("i", { class: "dot" }), text);
}

/** For how many seconds the run's process has said nothing, by the clock of this browser. */
function silentFor(run) {
  const known = seen.get(run.name);
  if (known?.at !== run.now.at) { seen.set(run.name, { at: run.now.at, when: Date.now() }); return 0; }
  return (Date.now() - known.when) / 1000;
}
