// Axes: numbers, checkpoints with their phases, and labels that never overlap.

import { axisOf } from "./numbers.js";
import { shorten } from "./format.js";
import { textWidth } from "./pen.js";

export const LABEL = 11.5;
const SLANT = 40; // degrees, for labels that do not fit side by side
const BOLD = 650; // of the label of the checkpoint on the slider
const TALLEST = 110; // pixels below the axis that labels may take

export function scale([from, to], [low, high]) {
  return (value) => low + ((value - from) / (to - from)) * (high - low);
}

// A label in so many pixels, also where it is set in bold: its middle gives way.
function fitted(label, room) {
  let letters = Math.min(24, Array.from(label).length);
  while (letters > 3 && textWidth(shorten(label, letters), LABEL, BOLD) > room) letters -= 1;
  return shorten(label, letters);
}

// How labels that are `step` apart are set: side by side, slanted, or only every so many. `left`: pixels from the edge of
// the drawing to the first column, which a slanted label must not leave.
export function layLabels(labels, step, left = 40) {
  const whole = labels.map((label) => shorten(label, 24));
  if (Math.max(0, ...whole.map((text) => textWidth(text, LABEL))) + 10 <= step) return { texts: whole, slanted: false, stride: 1, height: 22 };
  const slope = (SLANT * Math.PI) / 180;
  const below = (TALLEST - 26) / Math.sin(slope);
  const texts = labels.map((label, i) => fitted(label, Math.min(below, (left + (i + 0.5) * step - LABEL) / Math.cos(slope))));
  const widest = Math.max(0, ...texts.map((text) => textWidth(text, LABEL, BOLD)));
  const stride = Math.max(1, Math.ceil((LABEL * 1.25) / Math.sin(slope) / step));
  return { texts, slanted: true, stride, height: 16 + Math.sin(slope) * widest + 10 };
}

function isLabelled(i, n, stride) {
  if (i === n - 1) return true;
  return i % stride === 0 && n - 1 - i >= stride;
}

// Runs of equal phase among these checkpoints: [phase, first, last], by place in the list.
export function phaseRuns(data, checkpoints) {
  const runs = [];
  checkpoints.forEach((c, i) => {
    const phase = data.checkpoints[c].phase ?? "";
    if (runs.length && runs[runs.length - 1][0] === phase) runs[runs.length - 1][2] = i;
    else runs.push([phase, i, i]);
  });
  return runs;
}

// Where checkpoints stand along x: in order, or at their step or tokens. `frame` has left and right; returns x(i), the
// edges of each one's column, and the mean space between two.
export function checkpointPlaces(app, frame, checkpoints, ordinal = false) {
  const n = checkpoints.length;
  const step = (frame.right - frame.left) / n;
  const { axis } = app.store.state;
  if (ordinal || axis === "order" || n < 2) {
    return { x: (i) => frame.left + (i + 0.5) * step, edge: (i) => frame.left + i * step, step, numbers: null };
  }
  const log = axis.startsWith("log ");
  const key = axis.replace("log ", "");
  const raw = checkpoints.map((c) => app.data.checkpoints[c][key]);
  const values = log ? raw.map(Math.log10) : raw;
  const x = scale([values[0], values[n - 1]], [frame.left + 16, frame.right - 16]);
  const at = values.map(x);
  const edge = (i) => (i === 0 ? frame.left : i === n ? frame.right : (at[i - 1] + at[i]) / 2);
  return { x: (i) => at[i], edge, step, numbers: { raw, log, key, x: (value) => x(log ? Math.log10(value) : value) } };
}

// A number of steps or tokens, short: 4.7M.
export function amount(value) {
  const [unit, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]].find(([size]) => value >= size) ?? [1, ""];
  return `${Number((value / unit).toPrecision(3))}${letter}`;
}

function numberLabels(g, frame, { raw, log, key, x }) {
  const [low, high] = [raw[0], raw[raw.length - 1]];
  const ticks = [];
  if (log) for (let power = 10 ** Math.ceil(Math.log10(low)); power <= high; power *= 10) ticks.push(power);
  else ticks.push(...axisOf([low, high], [low, high], { parts: 5 }).ticks);
  for (const tick of ticks.length > 1 ? ticks : [low, high]) {
    g.pen.text(amount(tick), x(tick), frame.bottom + 17, { size: LABEL, fill: g.theme.muted, anchor: "middle" });
  }
  g.pen.text(`${key === "step" ? "training steps" : "training tokens"}${log ? " (log scale)" : ""}`, frame.right, frame.bottom + 32, { size: LABEL, fill: g.theme.ink, anchor: "end" });
}

// The checkpoints along x, with their phases. `ordinal`: in order, whatever the reader chose for curves.
export function checkpointAxis(g, frame, checkpoints, layout, ordinal = false) {
  const { pen, theme, app } = g;
  const n = checkpoints.length;
  const places = checkpointPlaces(app, frame, checkpoints, ordinal);
  const { x, edge, step } = places;
  checkpoints.forEach((c, i) => {
    if (places.numbers || !isLabelled(i, n, layout.stride)) return;
    const current = c === app.store.state.checkpoint;
    const style = { size: LABEL, fill: current ? theme.ink : theme.muted, weight: current ? BOLD : 400 };
    if (layout.slanted) pen.text(layout.texts[i], x(i) + 4, frame.bottom + 16, { ...style, anchor: "end", rotate: -SLANT });
    else pen.text(layout.texts[i], x(i), frame.bottom + 17, { ...style, anchor: "middle" });
  });
  if (places.numbers) numberLabels(g, frame, places.numbers);
  const runs = phaseRuns(app.data, checkpoints);
  for (const [phase, first, last] of runs.length > 1 ? runs : []) {
    if (first > 0) pen.line([[edge(first), frame.top], [edge(first), frame.bottom]], { stroke: theme.line, width: 0.8, dash: [3, 3] });
    const room = edge(last + 1) - edge(first) - 6;
    if (textWidth(phase, 11) <= room) pen.text(phase, (edge(first) + edge(last + 1)) / 2, frame.top - 7, { size: 11, fill: theme.muted, anchor: "middle" });
  }
  return { x, step };
}

// A soft column behind the checkpoint on the slider.
export function currentColumn(g, frame, checkpoints, ordinal = false) {
  const i = checkpoints.indexOf(g.app.store.state.checkpoint);
  if (i < 0) return;
  const { edge } = checkpointPlaces(g.app, frame, checkpoints, ordinal);
  g.pen.rect(edge(i), frame.top, edge(i + 1) - edge(i), frame.bottom - frame.top, { fill: g.theme.faint, alpha: 0.55 });
}

export function valueAxis(g, frame, y, ticks, format) {
  for (const tick of ticks) {
    const at = y(tick);
    const zero = tick === 0;
    g.pen.line([[frame.left, at], [frame.right, at]], { stroke: zero ? g.theme.line : g.theme.faint, width: 1 });
    g.pen.text(format(tick), frame.left - 7, at + 4, { size: LABEL, fill: g.theme.muted, anchor: "end" });
  }
}

// ± 1 standard error at each value whose error is known.
export function drawErrors(g, x, y, values, errors, limits) {
  const inside = (value) => y(Math.max(limits[0], Math.min(limits[1], value)));
  values.forEach((value, i) => {
    if (Number.isFinite(value + errors[i])) g.pen.line([[x(i), inside(value - errors[i])], [x(i), inside(value + errors[i])]], { stroke: g.theme.ink, width: 1.2 });
  });
}

// Areas that a pointer can be in, one per checkpoint: they move the slider.
export function columnHits(g, frame, checkpoints, lines, ordinal = false) {
  const { edge } = checkpointPlaces(g.app, frame, checkpoints, ordinal);
  return checkpoints.map((c, i) => ({
    x: edge(i),
    y: frame.top,
    w: edge(i + 1) - edge(i),
    h: frame.bottom - frame.top,
    lines: [g.app.data.checkpoints[c].label, ...lines(c)],
    click: () => g.app.store.set({ checkpoint: c }),
  }));
}
