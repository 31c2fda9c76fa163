// Means by checkpoint: components of mean r_k, and explained variance; and what all curves share.

import { View } from "./view.js";
import { partColours } from "./colours.js";
import { checkpointAxis, columnHits, currentColumn, drawErrors, layLabels, scale, valueAxis } from "./axis.js";
import { correlation, percent } from "./format.js";
import { estimate } from "./numbers.js";
import { textWidth } from "./pen.js";

const MOST_TOLD = 6;
const HEIGHT = 330;
const USES = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "axis", "theme"];

// Where the entries of a key stand: side by side, on as many lines as it takes.
function layKey(entries, width) {
  let [x, y] = [8, 12];
  return entries.map((entry) => {
    const room = 24 + textWidth(entry.text, 12) + 18;
    if (x + room > width && x > 8) [x, y] = [8, y + 17];
    const place = { ...entry, x, y };
    x += room;
    return place;
  });
}

// The key above, the axis below, and what is left for the curves.
export function curveFrame(g, checkpoints, key, { left = 44, right = g.width - 12 } = {}) {
  const placed = layKey(key, g.width);
  for (const { text, colour, mark, dash, fill, bar, hollow, alpha = 0.3, x, y } of placed) {
    if (bar) g.pen.line([[x + 9, y - 10], [x + 9, y + 2]], { stroke: g.theme.ink, width: 1.2 });
    else if (fill) g.pen.rect(x, y - 8, 16, 10, { fill, alpha });
    else g.pen.line([[x, y - 4], [x + 18, y - 4]], { stroke: colour, width: 2, dash });
    if (mark) g.pen.mark(mark, x + 9, y - 4, 3.6, hollow ? { fill: g.theme.paper, stroke: colour, width: 1.5 } : { fill: colour });
    g.pen.text(text, x + 24, y, { size: 12, fill: g.theme.ink });
  }
  const labels = checkpoints.map((c) => g.app.data.checkpoints[c].label);
  const layout = layLabels(labels, (right - left) / checkpoints.length, left);
  const frame = { left, right, top: placed[placed.length - 1].y + 32, bottom: g.height - layout.height };
  return { frame, layout };
}

// One line with marks, interrupted where a value is NaN, not where it is missing; between seeds or models there is none.
export function drawCurve(g, x, y, values, { colour, mark = "circle", dash = [], connected = true, hollow = false }) {
  let run = [];
  const runs = [run];
  values.forEach((value, i) => {
    if (Number.isFinite(value)) run.push([x(i), y(value)]);
    else if (value !== undefined) runs.push((run = []));
  });
  for (const points of runs) {
    if (connected && points.length > 1) g.pen.line(points, { stroke: colour, width: 2, dash, part: "curve" });
    const r = values.length > 60 ? 1.6 : 3.8;
    const style = hollow ? { fill: g.theme.paper, stroke: colour, width: 1.5 } : { fill: colour, stroke: g.theme.paper, width: 0.8 };
    for (const [px, py] of points) g.pen.mark(mark, px, py, r, style);
  }
}

export function drawBand(g, x, y, centres, spreads, colour, connected, limits) {
  const clamp = (value) => Math.max(limits[0], Math.min(limits[1], value));
  const known = centres.map((_, i) => i).filter((i) => Number.isFinite(centres[i] + spreads[i]));
  if (!connected) {
    for (const i of known) g.pen.line([[x(i), y(clamp(centres[i] - spreads[i]))], [x(i), y(clamp(centres[i] + spreads[i]))]], { stroke: colour, width: 5, alpha: 0.22 });
    return;
  }
  const upper = known.map((i) => [x(i), y(clamp(centres[i] + spreads[i]))]);
  const lower = known.map((i) => [x(i), y(clamp(centres[i] - spreads[i]))]).reverse();
  if (known.length > 1) g.pen.polygon([...upper, ...lower], { fill: colour, alpha: 0.13 });
}

// The errors over documents of a mean at these checkpoints, and the entry that they have in the key where one is known.
function errorsOf(app, checkpoints, name) {
  return checkpoints.map((c) => app.summaries.error(c, name));
}

function errorKey(...series) {
  return series.flat().some(Number.isFinite) ? [{ text: "± 1 SE over documents", bar: true }] : [];
}

// A mean with its error, and how far heads are apart.
function meanLine(app, c, name, text = `mean ${name}`) {
  const { mean, spread } = app.summaries.at(c)[name];
  return `${text} ${estimate(mean, app.summaries.error(c, name), 3)}${Number.isFinite(spread) ? `, SD over heads ${correlation(spread)}` : ""}`;
}

function lowest(series) {
  return Math.min(0, ...series.flat().filter(Number.isFinite));
}

function drawConcordance(g) {
  const { app } = g;
  const { data, selection, summaries } = app;
  const checkpoints = selection.checkpoints();
  const [ink, amber] = partColours(g);
  const { frame, layout } = curveFrame(g, checkpoints, [
    { text: "mean r_k", colour: data.about.colours.red, mark: "square" },
    { text: "mean |r_k|", colour: g.theme.muted, mark: "triangle", dash: [4, 3] },
    { text: "concordant part (up)", fill: ink, alpha: 0.75 },
    { text: "discordant part (down)", fill: amber, alpha: 0.75 },
    ...errorKey(errorsOf(app, checkpoints, "r_k")),
  ]);
  const all = checkpoints.map((c) => summaries.at(c));
  const bottom = Math.min(-0.2, Math.floor(lowest([all.map((s) => s.discordantPart), all.map((s) => s.r_k.mean)]) * 5) / 5);
  const top = Math.max(0.4, Math.min(1, Math.ceil(Math.max(0, ...all.map((s) => s.r_k_abs.mean).filter(Number.isFinite)) * 5) / 5));
  const y = scale([bottom, top], [frame.bottom, frame.top]);
  currentColumn(g, frame, checkpoints);
  const ticks = Array.from({ length: 11 }, (_, i) => Math.round((i - 5) * 2) / 10).filter((t) => t >= bottom - 1e-9 && t <= top + 1e-9);
  valueAxis(g, frame, y, ticks, (v) => correlation(v, 1));
  const { x, step } = checkpointAxis(g, frame, checkpoints, layout);
  const wide = Math.min(38, step * 0.62);
  all.forEach((s, i) => {
    for (const [value, colour] of [[s.concordantPart, ink], [s.discordantPart, amber]]) {
      if (Number.isFinite(value) && value !== 0) g.pen.rect(x(i) - wide / 2, Math.min(y(0), y(value)), wide, Math.abs(y(value) - y(0)), { fill: colour, alpha: 0.75 });
    }
  });
  const connected = data.oneRun;
  drawCurve(g, x, y, all.map((s) => s.r_k_abs.mean), { colour: g.theme.muted, mark: "triangle", dash: [4, 3], connected });
  drawCurve(g, x, y, all.map((s) => s.r_k.mean), { colour: data.about.colours.red, mark: "square", connected });
  for (const name of ["r_k", "r_k_abs"]) drawErrors(g, x, y, all.map((s) => s[name].mean), errorsOf(app, checkpoints, name), [bottom, top]);
  return columnHits(g, frame, checkpoints, (c) => {
    const s = summaries.at(c);
    const mean = (name) => estimate(s[name].mean, summaries.error(c, name), 3);
    return [`mean r_k ${mean("r_k")}, mean |r_k| ${mean("r_k_abs")}`, `concordant: ${percent(s.concordant)} of heads, part ${correlation(s.concordantPart, 3)}`, `discordant: ${percent(s.discordant)} of heads, part ${correlation(s.discordantPart, 3)}`];
  });
}

function drawVariance(g) {
  const { app } = g;
  const { data, selection, summaries } = app;
  const checkpoints = selection.checkpoints();
  const [, , teal] = data.about.colours.parts;
  const errors = errorsOf(app, checkpoints, "explained_variance");
  const { frame, layout } = curveFrame(g, checkpoints, [{ text: "mean explained variance", colour: teal, mark: "circle" }, { text: "± 1 SD over heads", fill: g.theme.line }, ...errorKey(errors)]);
  const all = checkpoints.map((c) => summaries.at(c).explained_variance);
  const high = Math.max(0.1, ...all.map((s) => s.mean + (s.spread || 0)).filter(Number.isFinite));
  const top = Math.min(1, Math.ceil(high * 10) / 10);
  const y = scale([0, top], [frame.bottom, frame.top]);
  currentColumn(g, frame, checkpoints);
  valueAxis(g, frame, y, Array.from({ length: 11 }, (_, i) => i / 10).filter((t) => t <= top + 1e-9 && (top <= 0.5 || Math.round(t * 10) % 2 === 0)), (v) => percent(v));
  const { x } = checkpointAxis(g, frame, checkpoints, layout);
  const connected = data.oneRun;
  drawBand(g, x, y, all.map((s) => s.mean), all.map((s) => s.spread), teal, connected, [0, top]);
  drawCurve(g, x, y, all.map((s) => s.mean), { colour: teal, connected });
  drawErrors(g, x, y, all.map((s) => s.mean), errors, [0, top]);
  return columnHits(g, frame, checkpoints, (c) => [meanLine(app, c, "explained_variance", "mean explained variance")]);
}

// The table behind all three: a row per checkpoint and window.
export function trajectoryTable(app, choices = [app.store.state.choice]) {
  const measures = ["r_q", "r_k", "r_k_abs", "explained_variance"];
  const columns = ["model", "windows", "window", "heads", ...measures.flatMap((m) => [m, `${m}_std`]), "concordant", "discordant"];
  const rows = choices.flatMap((choice) => app.selection.checkpoints().map((c) => {
    const s = app.summaries.at(c, { choice });
    const pairs = measures.flatMap((m) => [s[m].mean, s[m].spread]);
    return [app.data.checkpoints[c].name, choice, app.data.window(choice, c), s.heads, ...pairs, s.concordant, s.discordant];
  }));
  return { columns, rows };
}

// The entries that are read out: the ends of a run; of seeds and models each, as far as one listens.
export function toldOf(app) {
  const all = app.selection.checkpoints();
  return app.data.oneRun ? [...new Set([all[0], all.at(-1)])] : all.slice(0, MOST_TOLD);
}

export function spoken(app, names) {
  const told = toldOf(app).map((c) => {
    const s = app.summaries.at(c);
    return `${app.data.checkpoints[c].label}: ${names.map((n) => `mean ${n} ${correlation(s[n].mean)}`).join(", ")}`;
  });
  return told.join("; ");
}

// What is said where errors are known, but not for what is shown.
export function errorNote(app) {
  const { data, selection, store } = app;
  const known = selection.allHeads && data.components[store.state.component] === 0;
  return data.hasErrors && !known ? "Standard errors are available for all heads on PC0, not for this selection." : "";
}

export function curveViews(app) {
  const common = { surface: "svg", uses: USES, height: () => HEIGHT, table: () => trajectoryTable(app), note: () => errorNote(app) };
  return {
    concordance: new View(app, {
      ...common, id: "concordance", title: "Components of mean r_k", card: "depth", draw: drawConcordance,
      about: `Concordant keys (r_k above ${app.data.about.thresholds.concordance}) and discordant keys (below −${app.data.about.thresholds.concordance}) cancel in the mean.`,
      label: () => `Mean r_k and its parts. ${spoken(app, ["r_k", "r_k_abs"])}`,
    }),
    variance: new View(app, {
      ...common, id: "variance", title: "Explained variance", card: "explained_variance", draw: drawVariance,
      about: "Share of the variance of queries and keys together along the component.",
      label: () => `Explained variance by ${app.data.noun}. ${spoken(app, ["explained_variance"])}`,
    }),
  };
}
