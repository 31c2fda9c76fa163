// The phase portrait: r_q across, r_k up, one mark per head. Drawn here for the explorer and for the comparison.

import { categoryColour, headPaint, markOf } from "./colours.js";
import { correlation } from "./format.js";
import { scale, LABEL } from "./axis.js";
import { axisOf } from "./numbers.js";
import { textWidth } from "./pen.js";

const CROWD = 200; // beyond so many heads a soft ground shows how many lie where
const CELLS = 14; // of that ground, across
const MARGIN = { left: 44, right: 24, top: 24, bottom: 40 };
const FARTHEST = 1.06; // a little beyond what a correlation can be
const STRIP = 3; // pixels: the edge of a zone in the colour of its category

export function dotRadius(heads, width) {
  const roomy = heads <= 100 ? 5.5 : heads <= 700 ? 4.2 : heads <= 1500 ? 3.2 : 2.5;
  return width < 480 ? Math.max(2, roomy * 0.75) : roomy;
}

// All that can be seen: r_q starts at 0 because components are turned so that r_q >= 0, unless a table from elsewhere
// has it otherwise.
export function wholeRange(app) {
  return { r_q: [app.lowestQuery < -0.05 ? -1.05 : -0.06, FARTHEST], r_k: [-FARTHEST, FARTHEST] };
}

export function portraitFrame(app, box, zoom = null) {
  const frame = { left: box.x + MARGIN.left, right: box.x + box.w - MARGIN.right, top: box.y + MARGIN.top, bottom: box.y + box.h - MARGIN.bottom };
  const range = zoom ?? wholeRange(app);
  return {
    ...frame,
    range,
    zoomed: zoom !== null,
    x: scale(range.r_q, [frame.left, frame.right]),
    y: scale(range.r_k, [frame.bottom, frame.top]),
    toQ: scale([frame.left, frame.right], range.r_q),
    toK: scale([frame.bottom, frame.top], range.r_k),
  };
}

// Whether a place is in what is shown.
export function isInside({ range: { r_q, r_k } }, q, k) {
  return q >= r_q[0] && q <= r_q[1] && k >= r_k[0] && k <= r_k[1];
}

// The corners that thresholds name: [category, r_q range, r_k range, the edge at which its name stands].
function zones(app) {
  const { high, low } = app.data.about.thresholds;
  const [first] = wholeRange(app).r_q;
  return [
    ["position-dominated", [high, FARTHEST], [high, FARTHEST], "top"],
    [app.data.about.against.name, [high, FARTHEST], [-FARTHEST, -high], "right"],
    ["Q-positional", [high, FARTHEST], [-low, low], "right"],
    ["K-positional", [first, low], [high, FARTHEST], "top"],
    ["K-positional", [first, low], [-FARTHEST, -high], null],
    ["content-focused", [first, low], [-low, low], "left"],
  ];
}

// A zone in its colour; its name stands outside, where no mark can hide it, if there is room.
function drawZone(g, frame, [name, q, k, edge]) {
  const { pen, theme, app } = g;
  const { r_q: across, r_k: up } = frame.range;
  const [left, right] = [Math.max(q[0], across[0]), Math.min(q[1], across[1])].map(frame.x);
  const [bottom, top] = [Math.max(k[0], up[0]), Math.min(k[1], up[1])].map(frame.y);
  if (right - left < 1 || bottom - top < 1) return;
  const colour = categoryColour([...app.data.categories, app.data.about.against].find((category) => category.name === name), theme);
  pen.rect(left, top, right - left, bottom - top, { fill: colour, alpha: theme.zone });
  const room = edge === "top" ? right - left : bottom - top;
  if (edge === null || app.data.components[app.store.state.component] !== 0 || textWidth(name, 11) > room + 16) return;
  const text = { size: 11, fill: theme.muted, anchor: "middle" };
  if (edge === "top") {
    pen.rect(left, frame.top - STRIP, right - left, STRIP, { fill: colour });
    pen.text(name, (left + right) / 2, frame.top - STRIP - 5, text);
  } else if (edge === "right") {
    pen.rect(frame.right, top, STRIP, bottom - top, { fill: colour });
    pen.text(name, frame.right + STRIP + 6, (top + bottom) / 2, { ...text, rotate: 90 });
  } else if (frame.bottom - frame.top > 330) {
    pen.rect(frame.left - STRIP, top, STRIP, bottom - top, { fill: colour });
    pen.text(name, frame.left - 36, (top + bottom) / 2, { ...text, rotate: -90 });
  }
}

// Ticks at the thresholds, or where a part is shown, at round numbers.
function drawLevels(g, frame) {
  const { pen, theme, app } = g;
  const { high, low } = app.data.about.thresholds;
  const dashed = { stroke: theme.line, width: 0.7, dash: [3, 4] };
  const named = [-1, -high, -low, 0, low, high, 1];
  const ticks = (range) => {
    const axis = axisOf(range, range, { parts: 5 });
    return frame.zoomed ? axis.ticks.map((tick) => [tick, axis.text(tick)]) : named.map((tick) => [tick, correlation(tick, 1)]);
  };
  const within = (value, [from, to]) => value >= from && value <= to;
  for (const level of named.filter((value) => Math.abs(value) !== 1)) {
    if (level && within(level, frame.range.r_q)) pen.line([[frame.x(level), frame.top], [frame.x(level), frame.bottom]], dashed);
    if (within(level, frame.range.r_k)) pen.line([[frame.left, frame.y(level)], [frame.right, frame.y(level)]], level ? dashed : { stroke: theme.line, width: 1 });
  }
  for (const [tick, text] of ticks(frame.range.r_q)) if (within(tick, frame.range.r_q)) pen.text(text, frame.x(tick), frame.bottom + 15, { size: LABEL, fill: theme.muted, anchor: "middle" });
  for (const [tick, text] of ticks(frame.range.r_k)) if (within(tick, frame.range.r_k)) pen.text(text, frame.left - 6, frame.y(tick) + 4, { size: LABEL, fill: theme.muted, anchor: "end" });
}

export function drawFrame(g, frame) {
  const { pen, theme, app } = g;
  for (const zone of zones(app)) drawZone(g, frame, zone);
  drawLevels(g, frame);
  pen.line([[frame.left, frame.top], [frame.left, frame.bottom], [frame.right, frame.bottom]], { stroke: theme.line });
  const words = "r_q: how closely queries track position";
  pen.text(textWidth(words, 12) < frame.right - frame.left ? words : "r_q, queries", frame.right, frame.bottom + 32, { size: 12, fill: theme.ink, anchor: "end" });
  pen.text("r_k, keys", frame.left - 36, frame.top, { size: 12, fill: theme.ink, anchor: "end", rotate: -90 });
}

// The part of a line that is inside the frame; null where none is.
export function clipped(frame, [x0, y0], [x1, y1]) {
  let [from, to] = [0, 1];
  const sides = [[x0 - x1, x0 - frame.left], [x1 - x0, frame.right - x0], [y0 - y1, y0 - frame.top], [y1 - y0, frame.bottom - y0]];
  for (const [speed, room] of sides) {
    if (speed === 0 && room < 0) return null;
    if (speed < 0) from = Math.max(from, room / speed);
    if (speed > 0) to = Math.min(to, room / speed);
  }
  return from < to ? [from, to].map((share) => [x0 + share * (x1 - x0), y0 + share * (y1 - y0)]) : null;
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
      const line = clipped(frame, ...ends.map(([q, k]) => [frame.x(q), frame.y(k)]));
      if (line) pen.line(line, style);
    }
  }
}

// The marks themselves; heads that are not meant stay as a faint ground.
export function drawDots(g, frame, { mask, x, y, checkpoint, radius, errors = false }) {
  const { pen, theme, app } = g;
  const { data, store } = app;
  const { component, choice, head, hover } = store.state;
  const paintOf = (h) => headPaint(data, choice, data.at(checkpoint, component, h), theme);
  const seen = (h) => Number.isFinite(x[h]) && Number.isFinite(y[h]) && (!frame.zoomed || isInside(frame, x[h], y[h]));
  const all = Array.from(mask.keys()).filter(seen);
  if (frame.range && all.length > CROWD) drawDensity(g, frame, all.filter((h) => mask[h]).map((h) => [x[h], y[h]]));
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
    if (h === null || !seen(h)) continue;
    const kind = markOf(data.kind("layer_kind", checkpoint, h));
    if (errors) drawCross(g, frame, [x[h], y[h]], ["r_q", "r_k"].map((name) => data.error(name, store.state, checkpoint, h)));
    pen.mark(kind, frame.x(x[h]), frame.y(y[h]), radius + 1, { ...paintOf(h), stroke: theme.ink, width });
    drawName(g, frame, data.name(h), frame.x(x[h]), frame.y(y[h]), radius);
  }
}

// How many heads lie where, as a soft ground: hundreds of marks hide each other.
function drawDensity(g, frame, points) {
  const [wide, tall] = [frame.right - frame.left, frame.bottom - frame.top];
  const size = wide / CELLS;
  const rows = Math.ceil(tall / size);
  const counts = new Uint32Array(CELLS * rows);
  const place = (pixels, count) => Math.min(count - 1, Math.max(0, Math.floor(pixels / size)));
  for (const [q, k] of points) counts[place(frame.x(q) - frame.left, CELLS) + CELLS * place(frame.bottom - frame.y(k), rows)] += 1;
  const most = counts.reduce((a, b) => Math.max(a, b), 0);
  counts.forEach((count, i) => {
    const [left, bottom] = [frame.left + (i % CELLS) * size, frame.bottom - Math.floor(i / CELLS) * size];
    const top = Math.max(frame.top, bottom - size);
    if (count) g.pen.rect(left, top, size, bottom - top, { fill: g.theme.ink, alpha: 0.05 + (0.2 * count) / most });
  });
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
