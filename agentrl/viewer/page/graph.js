// The graph of stages (boxes) and channels (rounded), as it was in the steps that are shown.

import { el } from "./dom.js";

const [BOX, GAP, HEAD, LINE, PAD, TOP, BETWEEN] = [178, 24, 22, 16, 10, 26, 40];
const INNER = ["engine", "environments", "rewards"];

/** `nodes`: as the server gives them, in the order in which an episode meets them; `hues`: the stages' colours. */
export function drawGraph(holder, nodes, hues) {
  const outer = nodes.filter((node) => !INNER.includes(node.name)), inner = nodes.filter((node) => INNER.includes(node.name));
  const tall = (row) => HEAD + 10 + PAD + LINE * Math.max(0, ...row.map((node) => node.facts.length));
  const [high, low] = [tall(outer), tall(inner)], below = TOP + high + BETWEEN;
  const left = (i) => i * (BOX + GAP), width = left(Math.max(outer.length, inner.length)) - GAP;
  const height = inner.length ? below + low : TOP + high;
  const svg = el("svg", { viewBox: `-2 -2 ${width + 4} ${height + 4}`, style: { width: `${width + 4}px`, height: `${height + 4}px`, display: "block" }, role: "img", "aria-label": "stages and channels" });
  outer.slice(1).forEach((node, i) => svg.append(arrow([left(i) + BOX, TOP + high / 2], [left(i + 1), TOP + high / 2])));
  svg.append(arrow([left(outer.length - 1) + BOX / 2, TOP], [left(outer.length - 1) + BOX / 2, 8], [BOX / 2, 8], [BOX / 2, TOP]));
  if (inner.length) svg.append(arrow([BOX / 2, TOP + high], [BOX / 2, below]));
  inner.slice(1).forEach((node, i) => {
    const [from, to, y] = [left(i) + BOX, left(i + 1), below + low / 2];
    svg.append(arrow([from, y], [to, y]));
    if (node.name === "environments") svg.append(arrow([to, y + 10], [from, y + 10]));
  });
  outer.forEach((node, i) => svg.append(box(node, left(i), TOP, high, hues[node.name])));
  inner.forEach((node, i) => svg.append(box(node, left(i), below, low, hues[node.name])));
  holder.replaceChildren(svg);
}

/** A line through some points, with a head at the last one. */
function arrow(...points) {
  const [[x0, y0], [x, y]] = points.slice(-2), [dx, dy] = [Math.sign(x - x0), Math.sign(y - y0)];
  const head = `M${x - 6 * dx - 4 * dy} ${y - 6 * dy - 4 * dx}L${x} ${y}L${x - 6 * dx + 4 * dy} ${y - 6 * dy + 4 * dx}`;
  return el("path", { d: `M${points.map((point) => point.join(" ")).join("L")}${head}`, fill: "none", stroke: "var(--soft)", "stroke-width": 1.4 });
}

function box(node, x, y, height, colour = "var(--soft)") {
  const busy = node.kind === "stage" ? node.share : node.full;
  const known = busy !== null && busy !== undefined;
  return el("g", {}, el("rect", { x, y, width: BOX, height, rx: node.kind === "channel" ? 16 : 5, fill: "var(--faint)", stroke: colour, "stroke-width": 1.3 }),
    el("text", { class: "lane-name", x: x + PAD, y: y + 18, "font-weight": 600 }, node.name),
    known ? el("text", { class: "tick", x: x + BOX - PAD, y: y + 18, "text-anchor": "end" }, `${Math.round(100 * busy)} %`) : null,
    known ? el("rect", { x: x + PAD, y: y + HEAD + 3, width: Math.max(1, (BOX - 2 * PAD) * Math.min(1, busy)), height: 4, rx: 2, fill: colour }) : null,
    node.facts.map(([what, value], i) => [el("text", { class: "tick", x: x + PAD, y: y + HEAD + 22 + i * LINE }, what), el("text", { class: "tick", x: x + BOX - PAD, y: y + HEAD + 22 + i * LINE, "text-anchor": "end" }, String(value))]));
}
