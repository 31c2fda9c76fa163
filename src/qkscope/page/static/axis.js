// Axes: numbers, checkpoints with their phases, and labels that never overlap.

import { shorten } from "./format.js";
import { textWidth } from "./pen.js";

export const LABEL = 11.5;
const SLANT = 40; // degrees, for labels that do not fit side by side

export function scale([from, to], [low, high]) {
  return (value) => low + ((value - from) / (to - from)) * (high - low);
}

// How labels that are `step` apart are set: side by side, slanted, or only every so many.
export function layLabels(labels, step) {
  const texts = labels.map((label) => shorten(label, 24));
  const widest = Math.max(0, ...texts.map((text) => textWidth(text, LABEL)));
  if (widest + 10 <= step) return { texts, slanted: false, stride: 1, height: 22 };
  const slope = (SLANT * Math.PI) / 180;
  const stride = Math.max(1, Math.ceil((LABEL * 1.25) / Math.sin(slope) / step));
  return { texts, slanted: true, stride, height: 16 + Math.sin(slope) * widest + 8 };
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

// The checkpoints along x. `frame` is {left, right, top, bottom}; returns x(i) and the space between two.
export function checkpointAxis(g, frame, checkpoints, layout) {
  const { pen, theme, app } = g;
  const n = checkpoints.length;
  const step = (frame.right - frame.left) / n;
  const x = (i) => frame.left + (i + 0.5) * step;
  checkpoints.forEach((c, i) => {
    if (!isLabelled(i, n, layout.stride)) return;
    const current = c === app.store.state.checkpoint;
    const style = { size: LABEL, fill: current ? theme.ink : theme.muted, weight: current ? 650 : 400 };
    if (layout.slanted) pen.text(layout.texts[i], x(i) + 4, frame.bottom + 16, { ...style, anchor: "end", rotate: -SLANT });
    else pen.text(layout.texts[i], x(i), frame.bottom + 17, { ...style, anchor: "middle" });
  });
  const runs = phaseRuns(app.data, checkpoints);
  for (const [phase, first, last] of runs.length > 1 ? runs : []) {
    const edge = frame.left + first * step;
    if (first > 0) pen.line([[edge, frame.top], [edge, frame.bottom]], { stroke: theme.line, width: 0.8, dash: [3, 3] });
    const room = (last - first + 1) * step - 6;
    if (textWidth(phase, 11) <= room) pen.text(phase, x((first + last) / 2), frame.top - 7, { size: 11, fill: theme.muted, anchor: "middle" });
  }
  return { x, step };
}

// A soft column behind the checkpoint on the slider.
export function currentColumn(g, frame, checkpoints) {
  const i = checkpoints.indexOf(g.app.store.state.checkpoint);
  if (i < 0) return;
  const step = (frame.right - frame.left) / checkpoints.length;
  g.pen.rect(frame.left + i * step, frame.top, step, frame.bottom - frame.top, { fill: g.theme.faint, alpha: 0.55 });
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
export function columnHits(g, frame, checkpoints, lines) {
  const step = (frame.right - frame.left) / checkpoints.length;
  return checkpoints.map((c, i) => ({
    x: frame.left + i * step,
    y: frame.top,
    w: step,
    h: frame.bottom - frame.top,
    lines: [g.app.data.checkpoints[c].label, ...lines(c)],
    click: () => g.app.store.set({ checkpoint: c }),
  }));
}
