// Line charts as SVG: several series, bands, a common zoom, a logarithmic axis, smoothing, exact values on hover.

import { el, hideTip, middle, number, showTip } from "./dom.js";

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT, DOUBLE_CLICK] = [48, 8, 8, 20, 190, 300];

/** An exponential moving average that forgets its start (as Adam's), with weight 0 to 1 of the past. */
export function smoothed(points, weight) {
  if (!weight) return points;
  let mean = 0, mass = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, mean / mass];
  });
}

/** At most two points for each pixel: the lowest and the highest. */
function thinned(points, pixels) {
  if (points.length <= 2 * pixels) return points;
  const size = Math.ceil(points.length / pixels), kept = [];
  for (let at = 0; at < points.length; at += size) {
    const piece = points.slice(at, at + size);
    const low = piece.reduce((a, b) => (b[1] < a[1] ? b : a)), high = piece.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

/** Numbers at even distances within a range: the fewest that are `least` or more, and the distance. `whole`: integers. */
export function ticks(low, high, least = 3, whole = false) {
  let size = 10 ** Math.ceil(Math.log10(high - low));
  for (;;) {
    for (const nice of [5, 2, 1]) {
      const step = nice * size, found = [];
      for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
      if (found.length >= least || (whole && step <= 1)) return { at: found, step };
    }
    size /= 10;
  }
}

/** Ticks of a logarithmic axis, whose ends are powers of ten: powers of ten, or 1, 2 and 5 times these, or even distances. */
function logTicks(low, high) {
  const powers = [];
  for (let power = Math.floor(low); power <= high; power++) powers.push(power);
  const every = Math.ceil(powers.length / 6);
  for (const digits of [[1], [1, 2, 5]]) {
    const found = powers.filter((power) => digits.length > 1 || power % every === 0).flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((at) => Math.log10(at) >= low && Math.log10(at) <= high);
    if (found.length >= 3) return found;
  }
  return ticks(10 ** low, 10 ** high).at;
}

/** A tick's number with as many digits as tell it from the next one. */
function tickText(value, step) {
  const size = Math.abs(value);
  return size >= 1e4 || (size > 0 && step < 1e-4) ? number(value, size && step ? Math.min(9, Math.max(3, Math.ceil(Math.log10(size / step)) + 1)) : 3) : value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

/**
 * `series`: {name, run, colour, points: [[x, y]], band: [[x, low, high]], dots}. `options`: log, smooth, zoom: [x, x] or
 * null, onzoom(range or null), onpick(step, run) for a click, alarms: [{step, run, text}], height.
 */
export function chart(holder, series, options) {
  const width = Math.max(180, holder.clientWidth || 400), height = options.height || HEIGHT;
  const positive = (y) => !options.log || y > 0;
  const shown = series.map((one) => {
    const points = one.points.filter(([, y]) => Number.isFinite(y) && positive(y));
    return { ...one, points, line: smoothed(points, one.dots ? 0 : options.smooth) };
  });
  const all = shown.flatMap((one) => one.points);
  if (!all.length) { holder.replaceChildren(el("div", { class: "empty small" }, options.log ? "nothing above 0" : "no value yet")); return; }
  const xs = all.map(([x]) => x);
  const reach = (values, start) => values.reduce(([a, b], each) => [Math.min(a, each), Math.max(b, each)], start);
  let [x0, x1] = options.zoom || reach(xs, [Infinity, -Infinity]);
  if (x1 - x0 < 2) { x0 = Math.floor(x0); x1 = Math.max(Math.ceil(x1), x0 + 2); }  // steps are integers: three of them
  const inside = ([x]) => x >= x0 && x <= x1;
  const ys = shown.flatMap((one) => [
    ...one.line.filter(inside).map(([, y]) => y),
    ...(one.band || []).filter(inside).flatMap(([, low, high]) => [low, high]).filter(positive),
  ]);
  const scale = options.log ? Math.log10 : (y) => y;
  let [y0, y1] = reach(ys.map(scale), [Infinity, -Infinity]);
  if (!Number.isFinite(y0)) [y0, y1] = [0, 1];
  if (y0 === 0 && y1 === 0) y1 = 1;
  if (y1 - y0 < Math.max(1e-12, 1e-6 * Math.max(Math.abs(y0), Math.abs(y1)))) { const room = Math.abs(y1) * 0.1 || 0.5; y0 -= room; y1 += room; }
  const room = (y1 - y0) * 0.06;
  y0 -= room; y1 += room;
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const py = (y) => height - BOTTOM - ((scale(y) - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, style: { height: `${height}px` }, role: "img", tabindex: 0, "aria-label": `${options.label || ""}: ${shown.map((one) => `${one.name} ${number(one.points.at(-1)?.[1], 4)}`).join(", ")}` });
  const even = options.log ? null : ticks(y0, y1), level = (at) => (options.log ? number(at) : tickText(at, even.step));
  for (const at of options.log ? logTicks(y0, y1) : even.at) {
    const y = py(at);
    svg.append(el("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), el("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, level(at)));
  }
  for (const at of ticks(x0, x1, Math.max(3, Math.floor(width / 200)), true).at) {
    const label = String(at), half = 3.2 * label.length;
    svg.append(el("text", { class: "tick", "data-axis": "x", x: Math.min(width - half, px(at)), y: height - 5, "text-anchor": "middle" }, label));
  }
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
  const drawn = el("g", {});
  for (const one of shown) {
    const band = (one.band || []).filter(inside).filter(([, low]) => positive(low));
    if (band.length > 1) {
      const outline = [...band.map(([x, , high]) => [x, high]), ...band.map(([x, low]) => [x, low]).reverse()];
      drawn.append(el("path", { d: `${path(outline)}Z`, fill: one.colour, opacity: 0.14 }));
    } else if (band.length) {
      drawn.append(el("line", { x1: px(band[0][0]), x2: px(band[0][0]), y1: py(band[0][1]), y2: py(band[0][2]), stroke: one.colour, opacity: 0.4, "stroke-width": 3 }));
    }
    const near = one.line.filter(([x], i) => inside([x]) || (one.line[i + 1] && inside(one.line[i + 1])) || (one.line[i - 1] && inside(one.line[i - 1])));
    if (options.smooth && !one.dots) drawn.append(el("path", { d: path(thinned(one.points.filter(inside), width)), fill: "none", stroke: one.colour, opacity: 0.22 }));
    drawn.append(el("path", { d: path(thinned(near, width)), fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": one.dash || "none" }));
    if (one.dots || one.points.length === 1) for (const [x, y] of one.line.filter(inside)) drawn.append(el("circle", { cx: px(x), cy: py(y), r: 3, fill: one.colour }));
  }
  const cursor = el("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const brush = el("rect", { class: "brush", y: TOP, height: height - TOP - BOTTOM, width: 0 });
  const alarms = (options.alarms || []).filter((one) => one.step >= x0 && one.step <= x1);
  const marks = alarms.map(({ step }) => el("g", { class: "alarm", "data-step": step }, el("line", { x1: px(step), x2: px(step), y1: TOP, y2: height - BOTTOM }), el("path", { d: `M${px(step)} ${TOP + 4}l-5 -9h10z` })));
  svg.append(drawn, ...marks, brush, cursor);

  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + ((((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
  };
  let from = null, picking = null;
  /** The line with a point at a step, of several the one that is nearest to a height. */
  function lineAt(step, y = 0) {
    const there = shown.map((one) => [one, one.points.find(([x]) => x === step)]).filter(([, found]) => found);
    const away = ([, [, value]]) => Math.abs(py(value) - y);
    return there.length ? there.reduce((a, b) => (away(b) < away(a) ? b : a))[0] : alarms.find((one) => one.step === step);
  }
  svg.addEventListener("pointerdown", (event) => { from = at(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => {
    const x = at(event);
    if (from !== null) {
      brush.setAttribute("x", Math.min(px(from), px(x)));
      brush.setAttribute("width", Math.abs(px(from) - px(x)));
    }
    point(nearestTo(x), event);
  });
  const nearestTo = (x) => [...all.map(([at]) => at), ...alarms.map(({ step }) => step)].reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
  let pointed = null;
  function point(nearest, place) {
    pointed = nearest;
    cursor.setAttribute("x1", px(nearest));
    cursor.setAttribute("x2", px(nearest));
    cursor.setAttribute("visibility", "visible");
    const rows = shown.flatMap((one) => {
      const raw = one.points.find(([each]) => each === nearest), soft = one.line.find(([each]) => each === nearest);
      if (!raw) return [];
      const band = (one.band || []).find(([each]) => each === nearest);
      const value = options.smooth && !one.dots ? `${number(raw[1], 4)} (smooth ${number(soft[1], 4)})` : number(raw[1], 4);
      return [[middle(one.name), band ? `${value} (${number(band[1])} to ${number(band[2])})` : value, one.colour]];
    });
    for (const { text } of alarms.filter(({ step }) => step === nearest)) rows.push([text, "⚠"]);
    showTip(place, `step ${nearest}`, options.onpick ? [...rows, ["click: its episodes", ""]] : rows);
  }
  const steps = [...new Set(xs)].sort((a, b) => a - b).filter((x) => x >= x0 && x <= x1);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && pointed !== null) { event.preventDefault(); options.onpick?.(pointed, lineAt(pointed)?.run); return; }
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key], last = steps.length - 1;
    if (event.key === "Escape") { leave(); return; }
    if (by === undefined || last < 0) return;
    event.preventDefault();
    const next = pointed === null ? (by < 0 ? last : 0) : Math.min(last, Math.max(0, steps.indexOf(pointed) + by));
    const box = svg.getBoundingClientRect();
    point(steps[next], { clientX: box.left + (px(steps[next]) / width) * box.width, clientY: box.top + TOP });
  });
  function leave() { pointed = null; cursor.setAttribute("visibility", "hidden"); hideTip(); }
  svg.addEventListener("blur", leave);
  svg.addEventListener("pointerup", (event) => {
    const x = at(event), begun = from;
    from = null;
    brush.setAttribute("width", 0);
    if (begun === null) return;
    if (Math.abs(px(begun) - px(x)) > 6) { options.onzoom([Math.min(begun, x), Math.max(begun, x)]); return; }
    const box = svg.getBoundingClientRect(), step = nearestTo(x), line = lineAt(step, ((event.clientY - box.top) / box.height) * height);
    const pick = () => options.onpick?.(step, line?.run);
    clearTimeout(picking);
    if (options.zoom) picking = setTimeout(pick, DOUBLE_CLICK); else pick();  // a second click would show the whole range
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("dblclick", () => { clearTimeout(picking); options.onzoom(null); });
  const focused = holder.contains(document.activeElement);
  holder.replaceChildren(svg);
  if (focused) svg.focus({ preventScroll: true });
}
