// The phase portrait: r_q across, r_k up, one mark per head. Drawn here for the explorer and for the comparison.

import { headPaint, markOf } from "./colours.js";
import { correlation } from "./format.js";
import { scale, LABEL } from "./axis.js";
import { textWidth } from "./pen.js";

const CROWD = 200; // beyond so many heads a soft ground shows how many lie where
const CELL = 0.08; // of that ground
const MARGIN = { left: 44, right: 12, top: 12, bottom: 40 };

export function dotRadius(heads, width) {
  const roomy = heads <= 100 ? 5.5 : heads <= 700 ? 4.2 : heads <= 1500 ? 3.2 : 2.5;
  return width < 480 ? Math.max(2, roomy * 0.75) : roomy;
}

// Axes reach a little beyond what a correlation can be; r_q starts at 0 because components are turned so that
// r_q >= 0, unless a table from elsewhere has it otherwise.
export function portraitFrame(app, box) {
  const frame = { left: box.x + MARGIN.left, right: box.x + box.w - MARGIN.right, top: box.y + MARGIN.top, bottom: box.y + box.h - MARGIN.bottom };
  const lowest = app.lowestQuery < -0.05 ? -1.05 : -0.06;
  return {
    ...frame,
    lowest,
    x: scale([lowest, 1.06], [frame.left, frame.right]),
    y: scale([-1.06, 1.06], [frame.bottom, frame.top]),
    toQ: scale([frame.left, frame.right], [lowest, 1.06]),
    toK: scale([frame.bottom, frame.top], [-1.06, 1.06]),
  };
}

// The corners that thresholds name: [category, r_q range, r_k range, where its name stands].
function zones(app, lowest) {
  const { high, low } = app.data.about.thresholds;
  const [left, right] = [lowest, 1.06];
  return [
    ["position-dominated", [high, right], [high, 1.06], "top"],
    ["keys against", [high, right], [-1.06, -high], "bottom"],
    ["Q-positional", [high, right], [-low, low], "top"],
    ["K-positional", [left, low], [high, 1.06], "top"],
    ["K-positional", [left, low], [-1.06, -high], "bottom"],
    ["content-focused", [left, low], [-low, low], "top"],
  ];
}

export function drawFrame(g, frame) {
  const { pen, theme, app } = g;
  const { high, low } = app.data.about.thresholds;
  for (const [name, q, k, side] of zones(app, frame.lowest)) {
    const { colour } = [...app.data.categories, app.data.about.against].find((category) => category.name === name);
    const [x, y] = [frame.x(q[0]), frame.y(k[1])];
    const [w, h] = [frame.x(q[1]) - x, frame.y(k[0]) - y];
    pen.rect(x, y, w, h, { fill: colour, alpha: theme.zone });
    const size = Math.min(11, (11 * (w - 10)) / textWidth(name, 11));
    if (app.data.components[app.store.state.component] === 0 && size >= 7.5 && h > 18) pen.text(name, x + w / 2, side === "top" ? y + 13 : y + h - 6, { size, fill: theme.muted, anchor: "middle" });
  }
  const dashed = { stroke: theme.line, width: 0.7, dash: [3, 4] };
  const levels = [-1, -high, -low, 0, low, high, 1];
  for (const level of levels) {
    if (level >= frame.lowest) {
      if (Math.abs(level) !== 1 && level) pen.line([[frame.x(level), frame.top], [frame.x(level), frame.bottom]], dashed);
      pen.text(correlation(level, 1), frame.x(level), frame.bottom + 15, { size: LABEL, fill: theme.muted, anchor: "middle" });
    }
    if (Math.abs(level) !== 1) pen.line([[frame.left, frame.y(level)], [frame.right, frame.y(level)]], level ? dashed : { stroke: theme.line, width: 1 });
    pen.text(correlation(level, 1), frame.left - 6, frame.y(level) + 4, { size: LABEL, fill: theme.muted, anchor: "end" });
  }
  pen.line([[frame.left, frame.top], [frame.left, frame.bottom], [frame.right, frame.bottom]], { stroke: theme.line });
  pen.text("r_q: how closely queries follow position", frame.right, frame.bottom + 32, { size: 12, fill: theme.ink, anchor: "end" });
  pen.text("r_k: the same for keys", frame.left - 32, frame.top, { size: 12, fill: theme.ink, anchor: "end", rotate: -90 });
}

// Where heads came from: the last checkpoints, fading.
export function drawTrails(g, frame, { mask, x, y }) {
  const { pen, theme, app } = g;
  const { data, store, selection } = app;
  const { checkpoint, component, choice, trail, head } = store.state;
  if (!data.oneRun) return;
  const before = selection.checkpoints().filter((c) => c < checkpoint);
  const source = data.choices[choice];
  for (let h = 0; h < data.nHeads; h += 1) {
    const selected = h === head;
    const kept = selected ? before : trail === "all" ? before : before.slice(before.length - Number(trail));
    if ((!mask[h] && !selected) || !kept.length) continue;
    const points = kept.map((c) => [source.r_q[data.at(c, component, h)], source.r_k[data.at(c, component, h)]]);
    points.push([x[h], y[h]]);
    const paint = headPaint(data, choice, data.at(checkpoint, component, h), theme);
    for (let i = 1; i < points.length; i += 1) {
      const ends = [points[i - 1], points[i]];
      if (!ends.flat().every(Number.isFinite)) continue;
      const strength = i / (points.length - 1);
      const style = selected ? { stroke: theme.ink, width: 1.6, alpha: 0.3 + 0.6 * strength } : { stroke: paint.fill, width: 1, alpha: 0.08 + 0.3 * strength ** 2 };
      pen.line(ends.map(([q, k]) => [frame.x(q), frame.y(k)]), style);
    }
  }
}

// The marks themselves; heads that are not meant stay as a faint ground.
export function drawDots(g, frame, { mask, x, y, checkpoint, radius, errors = false }) {
  const { pen, theme, app } = g;
  const { data, store } = app;
  const { component, choice, head, hover } = store.state;
  const paintOf = (h) => headPaint(data, choice, data.at(checkpoint, component, h), theme);
  const all = Array.from(mask.keys()).filter((h) => Number.isFinite(x[h]) && Number.isFinite(y[h]));
  if (frame.lowest !== undefined && all.length > CROWD) drawDensity(g, frame, all.filter((h) => mask[h]).map((h) => [x[h], y[h]]));
  for (const kept of [false, true]) {
    for (const h of all) {
      if (Boolean(mask[h]) !== kept) continue;
      const kind = markOf(data.kind("layer_kind", checkpoint, h));
      const style = kept ? { ...paintOf(h), stroke: theme.edge, width: 0.8, alpha: all.length > CROWD ? 0.62 : 0.88 } : { fill: theme.line, alpha: 0.18 };
      pen.mark(kind, frame.x(x[h]), frame.y(y[h]), kept ? radius : radius * 0.7, style);
    }
  }
  // The head of the same number in another seed or model is another head.
  const named = data.oneRun || checkpoint === store.state.checkpoint ? [[hover, 1.5], [head, 2.2]] : [];
  for (const [h, width] of named) {
    if (h === null || !Number.isFinite(x[h]) || !Number.isFinite(y[h])) continue;
    const kind = markOf(data.kind("layer_kind", checkpoint, h));
    if (errors) drawCross(g, frame, [x[h], y[h]], ["r_q", "r_k"].map((name) => data.error(name, store.state, checkpoint, h)));
    pen.mark(kind, frame.x(x[h]), frame.y(y[h]), radius + 1, { ...paintOf(h), stroke: theme.ink, width });
    drawName(g, frame, data.name(h), frame.x(x[h]), frame.y(y[h]), radius);
  }
}

// How many heads lie where, as a soft ground: hundreds of marks hide each other.
function drawDensity(g, frame, points) {
  const counts = new Map();
  const place = (value, from) => Math.floor((value - from) / CELL);
  for (const [q, k] of points) {
    const key = `${place(q, frame.lowest)} ${place(k, -1.06)}`;
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  const most = Math.max(...counts.values());
  for (const [key, count] of counts) {
    const [i, j] = key.split(" ").map(Number);
    const [left, top] = [frame.x(frame.lowest + i * CELL), frame.y(-1.06 + (j + 1) * CELL)];
    g.pen.rect(left, top, frame.x(frame.lowest + (i + 1) * CELL) - left, frame.y(-1.06 + j * CELL) - top, { fill: g.theme.ink, alpha: 0.05 + (0.2 * count) / most });
  }
}

// One standard error over documents to either side.
function drawCross(g, frame, [q, k], [dq, dk]) {
  const style = { stroke: g.theme.ink, width: 1.2 };
  if (Number.isFinite(dq)) g.pen.line([[frame.x(q - dq), frame.y(k)], [frame.x(q + dq), frame.y(k)]], style);
  if (Number.isFinite(dk)) g.pen.line([[frame.x(q), frame.y(k - dk)], [frame.x(q), frame.y(k + dk)]], style);
}

function drawName(g, frame, name, x, y, radius) {
  const width = textWidth(name, 12, 650);
  const right = x + radius + 6 + width < frame.right;
  const left = right ? x + radius + 5 : x - radius - 5 - width;
  g.pen.rect(left - 2, y - 9, width + 4, 15, { fill: g.theme.paper, alpha: 0.8 });
  g.pen.text(name, left, y + 4, { size: 12, weight: 650, fill: g.theme.ink });
}
