// Charts of one head from its details: position profile, score map, RoPE kernel, plasticity over the window.

import { LABEL, scale, valueAxis } from "./axis.js";
import { axisOf, extent, outcome, significant, withError } from "./numbers.js";
import { ramp, readableOn } from "./colours.js";
import { textWidth } from "./pen.js";
import { whole } from "./format.js";

function frameOf(g, bottom = 34) {
  return { left: 46, right: g.width - 12, top: 14, bottom: g.height - bottom };
}

function positionTicks(g, frame, x, ends, text) {
  const axis = axisOf(ends, ends, { parts: g.width < 300 ? 3 : 5 });
  for (const tick of axis.ticks) g.pen.text(whole(Math.round(tick)), x(tick), frame.bottom + 15, { size: LABEL, anchor: "middle", fill: g.theme.muted });
  g.pen.text(text, frame.right, frame.bottom + 29, { size: LABEL, anchor: "end", fill: g.theme.ink });
}

function band(g, points, low, high, colour) {
  if (points.length < 2) return;
  g.pen.polygon([...points.map((p) => [p.x, high(p)]), ...points.map((p) => [p.x, low(p)]).reverse()], { fill: colour, alpha: 0.14 });
}

// Mean ± 1 SD of queries and keys per position: `rows` are [position, mean q, sd q, mean k, sd k].
export function drawProfile(g, rows, { labels = true } = {}) {
  const { blue, red } = g.app.data.about.colours;
  const frame = labels ? frameOf(g) : { left: 8, right: g.width - 22, top: 8, bottom: g.height - 18 };
  const known = rows.filter((row) => row.every(Number.isFinite));
  if (!known.length) return noDetail(g, "No profile at this window.");
  const axis = axisOf(extent(known.flatMap(([, q, sq, k, sk]) => [q - sq, q + sq, k - sk, k + sk])), null, { parts: 5 });
  const ends = [known[0][0], known.at(-1)[0]];
  const x = ends[0] === ends[1] ? () => (frame.left + frame.right) / 2 : scale(ends, [frame.left + 4, frame.right - 4]);
  const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
  if (labels) {
    valueAxis(g, frame, y, axis.ticks, axis.text);
    positionTicks(g, frame, x, ends, "position of the token");
  } else {
    g.pen.line([[frame.left, frame.bottom], [frame.right, frame.bottom]], { stroke: g.theme.line });
    g.pen.text("position →", frame.right, frame.bottom + 13, { size: 10.5, anchor: "end", fill: g.theme.muted });
  }
  const last = known.at(-1);
  const apart = Math.max(0, 12 - Math.abs(y(last[1]) - y(last[3]))) / 2; // so that q and k never stand on each other
  for (const [mean, spread, colour, mark, name, other] of [[1, 2, blue, "circle", "q", 3], [3, 4, red, "square", "k", 1]]) {
    const points = known.map((row) => ({ x: x(row[0]), at: row[mean], sd: row[spread] }));
    band(g, points, (p) => y(p.at - p.sd), (p) => y(p.at + p.sd), colour);
    g.pen.line(points.map((p) => [p.x, y(p.at)]), { stroke: colour, width: 2 });
    for (const p of points) g.pen.mark(mark, p.x, y(p.at), labels ? 3 : 2.2, { fill: colour });
    const higher = last[mean] > last[other] || (last[mean] === last[other] && mean === 1);
    g.pen.text(name, frame.right + 3, y(last[mean]) + 4 + (higher ? -apart : apart), { size: 12, weight: 650, fill: colour });
  }
  return known.map((row, i) => ({ x: x(row[0]) - 6, y: frame.top, w: 12, h: frame.bottom - frame.top, lines: [`position ${whole(Math.round(row[0]))}`, `queries ${significant(row[1], 3)}, SD ${significant(row[2], 2)}`, `keys ${significant(row[3], 3)}, SD ${significant(row[4], 2)}`], i }));
}

// A detail's rows as `drawProfile` wants them, without the bucket of position 0 where that is one by itself.
export function profileRows(detail) {
  if (!detail) return [];
  const rows = detail.start.map((start, i) => [(start + detail.end[i] - 1) / 2, detail.q_pc0[i], detail.q_pc0_sd[i], detail.k_pc0[i], detail.k_pc0_sd[i], detail.end[i]]);
  const alone = rows.length > 1 && detail.start[0] === 0 && detail.end[0] === 1;
  return rows.slice(alone ? 1 : 0).filter((row) => Number.isFinite(row[0])).map((row) => row.slice(0, 5));
}

function noDetail(g, text) {
  g.pen.text(text, g.width / 2, g.height / 2, { size: 12.5, anchor: "middle", fill: g.theme.muted });
  return [];
}

// The cells of a score map: query bucket downwards, part of the window with the keys across.
function mapCells(detail) {
  const columns = Object.keys(detail).filter((name) => /^to_\d+$/.test(name)).sort();
  const filled = columns.filter((name) => detail[name].some(Number.isFinite));
  const rows = detail.start.map((_, i) => i).filter((i) => Number.isFinite(detail.start[i]) && filled.some((name) => Number.isFinite(detail[name][i])));
  return { filled, rows };
}

// Mean scores of query buckets with keys of parts of the window, each row against its own mean: which keys win. A dot
// says that a cell does not differ significantly from that mean.
export function drawScoreMap(g, detail) {
  const { diverging } = g.app.data.about.colours;
  const critical = g.app.data.about.critical[g.app.store.state.checkpoint];
  if (!detail) return noDetail(g, "No score map at this window.");
  const { filled, rows } = mapCells(detail);
  if (!rows.length) return noDetail(g, "No score map at this window.");
  const frame = { left: 54, right: g.width - 8, top: 20, bottom: g.height - 50 };
  const centred = rows.map((i) => {
    const values = filled.map((name) => detail[name][i]);
    const known = values.filter(Number.isFinite);
    const mean = known.reduce((a, b) => a + b, 0) / (known.length || 1);
    return values.map((value) => value - mean);
  });
  const far = Math.max(1e-12, ...centred.flat().filter(Number.isFinite).map(Math.abs));
  const [across, down] = [(frame.right - frame.left) / filled.length, (frame.bottom - frame.top) / rows.length];
  const hits = [];
  centred.forEach((line, r) => {
    const i = rows[r];
    line.forEach((value, c) => {
      const box = { x: frame.left + c * across, y: frame.top + r * down, w: across, h: down };
      if (!Number.isFinite(value)) return;
      const fill = ramp(diverging, (value / far + 1) / 2);
      const error = detail[`${filled[c]}_se`]?.[i] ?? NaN;
      const found = outcome(value, error, critical);
      const within = found === "unchanged";
      g.pen.rect(box.x, box.y, box.w - 0.5, box.h - 0.5, { fill });
      if (within) g.pen.circle(box.x + across / 2, box.y + down / 2, Math.min(1.6, down / 5), { fill: readableOn(fill), alpha: 0.6 });
      const sure = { changed: "", unchanged: ", not significant", unknown: "; error not known" }[found];
      hits.push({ ...box, lines: [`queries at ${whole(detail.start[i])} to ${whole(detail.end[i] - 1)}`, `keys: part ${c + 1} of ${filled.length} of the window`, `mean score ${score(detail[filled[c]][i], error)}, ${significant(value, 2)} against these queries’ mean${sure}`] });
    });
    if (r % Math.ceil(13 / down) === 0) g.pen.text(whole(detail.start[i]), frame.left - 5, frame.top + (r + 0.5) * down + 4, { size: 10.5, anchor: "end", fill: g.theme.muted });
  });
  g.pen.text("early keys", frame.left, frame.bottom + 14, { size: LABEL, fill: g.theme.muted });
  g.pen.text("late keys", frame.right, frame.bottom + 14, { size: LABEL, anchor: "end", fill: g.theme.muted });
  g.pen.text("queries from", 2, frame.top - 8, { size: 10.5, fill: g.theme.muted });
  drawRamp(g, frame, diverging, far);
  return hits;
}

// A score or another number of a detail, with its error.
function score(value, error) {
  return withError(value, error ?? NaN, { plain: (number) => significant(number, 3) });
}

function drawRamp(g, frame, stops, far) {
  const [left, top, wide] = [frame.left + 44, frame.bottom + 26, Math.min(140, (frame.right - frame.left) / 2)];
  for (let i = 0; i < 35; i += 1) g.pen.rect(left + (i * wide) / 35, top, wide / 35 + 0.5, 9, { fill: ramp(stops, i / 34) });
  g.pen.text(`−${significant(far, 2)}`, left - 5, top + 9, { size: 10.5, anchor: "end", fill: g.theme.muted });
  const most = `+${significant(far, 2)}`;
  const words = [`${most} against the row’s mean`, `${most} against its row`, most].find((text) => left + wide + 5 + textWidth(text, 10.5) <= g.width);
  g.pen.text(words ?? most, left + wide + 5, top + 9, { size: 10.5, fill: g.theme.muted });
}

// The kernel at any distance from its rotation planes, each point the mean over a share `smooth` of its distance (planes
// that rotate faster average out), as in the figure; null where planes are not in the file.
function kernelCurve(detail, planes, smooth) {
  const atZero = detail.distance.findIndex((distance) => distance === 0);
  const known = (planes?.wavelength ?? []).map((wavelength, i) => ({ theta: (2 * Math.PI) / wavelength, amplitude: planes.amplitude[i], phase: planes.phase[i] })).filter((p) => Number.isFinite(p.theta + p.amplitude + p.phase));
  if (!known.length || atZero < 0 || !Number.isFinite(detail.kernel?.[atZero])) return null;
  const still = detail.kernel[atZero] - known.reduce((sum, p) => sum + p.amplitude * Math.cos(p.phase), 0);
  const sinc = (x) => (Math.abs(x) < 1e-9 ? 1 : Math.sin(x) / x);
  return (distance) => known.reduce((sum, { theta, amplitude, phase }) => sum + amplitude * Math.cos(theta * distance - phase) * sinc((theta * smooth * distance) / 2), still);
}

const SMOOTH = 0.25; // over which share of a distance the kernel is averaged
const FINE = 240; // points of its curve

// Mean score against distance, within the window: as the rotated mean query and key give it (line), and as measured (marks).
export function drawKernel(g, { detail, planes, window }) {
  const [ink, teal] = [g.theme.ink, g.app.data.about.colours.parts[2]];
  const points = (detail?.distance ?? []).map((distance, i) => ({ distance, kernel: detail.kernel?.[i] ?? NaN, kernelError: detail.kernel_se?.[i], measured: detail.measured?.[i] ?? NaN, error: detail.measured_se?.[i] })).filter((p) => p.distance < window).sort((a, b) => a.distance - b.distance);
  const known = points.filter((p) => Number.isFinite(p.kernel) || Number.isFinite(p.measured));
  if (!known.length) return noDetail(g, "No kernel at this window.");
  const frame = frameOf(g);
  const place = (distance) => Math.log2(distance + 1);
  const end = place(window - 1);
  const curve = kernelCurve(detail, planes, SMOOTH);
  const line = curve ? Array.from({ length: FINE + 1 }, (_, i) => 2 ** ((i * end) / FINE) - 1).map((distance) => ({ distance, at: curve(distance) })) : [];
  const axis = axisOf(extent([...line.map((p) => p.at), ...known.flatMap((p) => [line.length ? NaN : p.kernel, p.measured])]), null, { parts: 4 });
  const x = scale([0, end], [frame.left + 6, frame.right - 6]);
  const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
  valueAxis(g, frame, y, axis.ticks, axis.text);
  let last = -Infinity;
  for (let distance = 0; place(distance) <= end; distance = distance ? distance * 4 : 1) {
    const at = x(place(distance));
    if (at - textWidth(whole(distance), LABEL) / 2 < last + 6) continue;
    g.pen.text(whole(distance), at, frame.bottom + 15, { size: LABEL, anchor: "middle", fill: g.theme.muted });
    last = at + textWidth(whole(distance), LABEL) / 2;
  }
  g.pen.text("tokens from key to query (log scale)", frame.right, frame.bottom + 29, { size: LABEL, anchor: "end", fill: g.theme.ink });
  if (line.length) g.pen.line(line.map((p) => [x(place(p.distance)), y(p.at)]), { stroke: teal, width: 2, part: "kernel" });
  // Without its planes the kernel is known at a few distances only: joined, they would zigzag.
  else for (const p of known.filter((each) => Number.isFinite(each.kernel))) g.pen.circle(x(place(p.distance)), y(p.kernel), 2.4, { fill: teal });
  for (const p of known.filter((each) => Number.isFinite(each.measured))) {
    const at = x(place(p.distance));
    if (Number.isFinite(p.error)) g.pen.line([[at, y(p.measured - p.error)], [at, y(p.measured + p.error)]], { stroke: ink, width: 1.2 });
    g.pen.circle(at, y(p.measured), 3, { fill: g.theme.paper, stroke: ink, width: 1.4 });
  }
  return known.map((p) => ({ x: x(place(p.distance)) - 5, y: frame.top, w: 10, h: frame.bottom - frame.top, lines: [`distance ${whole(Math.round(p.distance))} tokens`, ...(Number.isFinite(p.kernel) ? [`rotated means ${score(p.kernel, p.kernelError)}`] : []), ...(Number.isFinite(p.measured) ? [`measured ${score(p.measured, p.error)}`] : [])] }));
}

// Plasticity along the window: how often two queries disagree about which of two earlier keys wins.
export function drawPlasticity(g, detail) {
  const [ink, amber] = [g.theme.ink, g.app.data.about.colours.parts[1]];
  const rows = (detail?.position ?? []).map((position, i) => ({ position, ap: detail.ap[i], error: detail.ap_se?.[i], alone: detail.ap_same_position?.[i] })).filter((p) => Number.isFinite(p.position + p.ap));
  if (!rows.length) return noDetail(g, "No plasticity at this window.");
  const frame = frameOf(g);
  const axis = axisOf([0, 1], [0, 1], { zero: true });
  const ends = [rows[0].position, rows.at(-1).position];
  const x = ends[0] === ends[1] ? () => (frame.left + frame.right) / 2 : scale(ends, [frame.left + 4, frame.right - 64]);
  const y = scale([0, 1], [frame.bottom, frame.top]);
  valueAxis(g, frame, y, axis.ticks, axis.text);
  positionTicks(g, frame, x, ends, "position of the query");
  for (const [key, colour, dash, name] of [["alone", amber, [4, 3], "one position"], ["ap", ink, [], "bucket"]]) {
    const points = rows.filter((p) => Number.isFinite(p[key]));
    if (points.length > 1) g.pen.line(points.map((p) => [x(p.position), y(p[key])]), { stroke: colour, width: 2, dash });
    if (points.length) g.pen.text(name, x(points.at(-1).position) + 4, y(points.at(-1)[key]) + (key === "ap" ? 10 : -2), { size: 10.5, fill: g.theme.ink });
  }
  for (const p of rows) if (Number.isFinite(p.error)) g.pen.line([[x(p.position), y(p.ap - p.error)], [x(p.position), y(p.ap + p.error)]], { stroke: g.theme.ink, width: 1.2 });
  return rows.map((p) => ({ x: x(p.position) - 6, y: frame.top, w: 12, h: frame.bottom - frame.top, lines: [`queries at ${whole(Math.round(p.position))}`, `plasticity ${score(p.ap, p.error)}`, ...(Number.isFinite(p.alone) ? [`at exactly one position ${significant(p.alone, 3)}`] : [])] }));
}

// Plasticity of a layer by the distance between two keys (across) and to the query (downwards).
export function drawPairs(g, detail) {
  const { sequential } = g.app.data.about.colours;
  const cells = (detail?.key_distance ?? []).map((key, i) => ({ key, query: detail.query_distance[i], ap: detail.ap[i], error: detail.ap_se?.[i] })).filter((c) => Number.isFinite(c.key + c.query + c.ap));
  if (!cells.length) return noDetail(g, "No map of pairs at this window.");
  const [keys, queries] = ["key", "query"].map((name) => [...new Set(cells.map((c) => c[name]))].sort((a, b) => a - b));
  const frame = { left: 56, right: g.width - 8, top: 22, bottom: g.height - 34 };
  const [across, down] = [(frame.right - frame.left) / keys.length, (frame.bottom - frame.top) / queries.length];
  const hits = cells.map((c) => {
    const box = { x: frame.left + keys.indexOf(c.key) * across, y: frame.top + queries.indexOf(c.query) * down, w: across, h: down };
    const fill = ramp(sequential, c.ap);
    g.pen.rect(box.x, box.y, box.w - 0.5, box.h - 0.5, { fill });
    if (across > 30 && down > 12) g.pen.text(significant(c.ap, 2), box.x + across / 2, box.y + down / 2 + 4, { size: 10, anchor: "middle", fill: readableOn(fill) });
    return { ...box, lines: [`distance between keys ${whole(Math.round(c.key))} tokens, to the query ${whole(Math.round(c.query))}`, `plasticity ${score(c.ap, c.error)}`] };
  });
  queries.forEach((value, i) => i % Math.ceil(13 / down) === 0 && g.pen.text(whole(Math.round(value)), frame.left - 5, frame.top + (i + 0.5) * down + 4, { size: 10.5, anchor: "end", fill: g.theme.muted }));
  keys.forEach((value, i) => i % Math.ceil(36 / across) === 0 && g.pen.text(whole(Math.round(value)), frame.left + (i + 0.5) * across, frame.bottom + 14, { size: 10.5, anchor: "middle", fill: g.theme.muted }));
  g.pen.text("tokens between the two keys", frame.right, frame.bottom + 29, { size: LABEL, anchor: "end", fill: g.theme.ink });
  g.pen.text("tokens to the query", 2, frame.top - 8, { size: 10.5, fill: g.theme.muted });
  return hits;
}
