// Columns of a lens over the checkpoints, as means over the shown heads: lines with bands, or bars.

import { axisOf, extent, significant, withError } from "./numbers.js";
import { checkpointAxis, columnHits, currentColumn, drawErrors, scale, valueAxis } from "./axis.js";
import { curveFrame, drawBand, drawCurve, toldOf } from "./curves.js";
import { meanAndSpread } from "./stats.js";
import { plural, shorten } from "./format.js";
import { textWidth } from "./pen.js";

const HEIGHT = 330;
const MARKS = ["circle", "square", "triangle", "circle"];
const LETTERS = 60; // of a measure in the key

// Mean and spread of a column over the shown heads, and how many have no value; of all heads together the mean's error
// over documents, of a selection the mean of the heads' own errors, which the mean's cannot exceed.
function overHeads(app, column, checkpoint) {
  const { store, selection } = app;
  const mask = selection.mask(checkpoint);
  const heads = Array.from(mask.keys()).filter((h) => mask[h]);
  const all = meanAndSpread(heads.map((h) => column.at(store.state, checkpoint, h)));
  const exact = selection.allHeads ? column.meanErrorAt(store.state, checkpoint) : NaN;
  const atMost = meanAndSpread(heads.map((h) => column.errorAt(store.state, checkpoint, h))).mean;
  return { ...all, error: Number.isFinite(exact) ? exact : atMost, exact: Number.isFinite(exact), heads: heads.length };
}

// The declared color; queries are blue and keys red wherever a column is about one of them; others have colors of parts.
function seriesColour(app, { name, color }, place) {
  if (color) return color;
  const { blue, red, parts } = app.data.about.colours;
  const kind = /(?:^|_)([qk])(?:_|$)/.exec(name)?.[1];
  return kind === "q" ? blue : kind === "k" ? red : parts[place % parts.length];
}

function seriesOf(app, columns) {
  const checkpoints = app.selection.checkpoints();
  return columns.filter((column) => column.isAt(app.store.state)).map((column, i) => {
    const all = checkpoints.map((c) => overHeads(app, column, c));
    return { column, colour: seriesColour(app, column, i), mark: MARKS[i], all, means: all.map((s, i) => (app.data.columnLines.has(checkpoints[i]) ? s.mean : undefined)), spreads: all.map((s) => s.spread), errors: all.map((s) => s.error) };
  });
}

function valueAxisOf(series, zero) {
  const ends = series.flatMap((s) => s.means.flatMap((mean, i) => [mean - (s.spreads[i] || 0), mean + (s.spreads[i] || 0)]));
  const limits = [0, 1].map((side) => {
    const all = series.map((s) => s.column.limits?.[side] ?? null);
    return all.includes(null) ? null : side ? Math.max(...all) : Math.min(...all);
  });
  return axisOf(extent(ends), limits, { zero });
}

function tooltipLines(s, i) {
  const { column } = s;
  if (s.means[i] === undefined) return [`${column.title}: not in this file`];
  const { mean, spread, count, heads, error, exact } = s.all[i];
  const unit = column.unit && Number.isFinite(mean) ? ` ${column.unit}` : "";
  return [
    `mean ${column.title} ${withError(mean, error, { atMost: !exact })}${unit}`,
    ...(Number.isFinite(spread) ? [`SD over heads ${significant(spread, 2)}`] : []),
    ...(count < heads ? [`undefined for ${heads - count} of ${plural(heads, "head")}`] : []),
  ];
}

// Frame, axes and the checkpoints; `draw` gets where things are.
function drawSeries(columns, { bars, draw }) {
  return (g) => {
    const { app } = g;
    const checkpoints = app.selection.checkpoints();
    const series = seriesOf(app, columns);
    if (!series.length) {
      g.pen.text("Not measured at this window.", g.width / 2, g.height / 2, { size: 13, anchor: "middle", fill: g.theme.muted });
      return [];
    }
    const axis = valueAxisOf(series, bars);
    const left = 16 + Math.max(...axis.ticks.map((tick) => textWidth(axis.text(tick), 11.5)));
    const units = new Set(series.map((s) => s.column.unit));
    const unit = units.size === 1 && series[0].column.unit ? ` (${series[0].column.unit})` : "";
    const named = series.map((s) => ({ text: shorten(`${s.column.title}${unit}`, LETTERS), ...(bars ? { fill: s.colour, alpha: 0.85 } : { colour: s.colour, mark: s.mark }) }));
    const key = [...named, { text: bars ? "means; ± 1 SD over heads" : "means; band: ± 1 SD over heads", fill: g.theme.line }];
    if (series.some((s) => s.errors.some(Number.isFinite))) key.push({ text: series.some((s) => s.all.some((a) => Number.isFinite(a.error) && !a.exact)) ? "± 1 SE over documents, at most" : "± 1 SE over documents", bar: true });
    const { frame, layout } = curveFrame(g, checkpoints, key, { left: Math.max(44, left), right: g.width - 12 });
    const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
    currentColumn(g, frame, checkpoints);
    valueAxis(g, frame, y, axis.ticks, axis.text);
    const { x, step } = checkpointAxis(g, frame, checkpoints, layout);
    draw(g, { series, frame, axis, x, y, step });
    return columnHits(g, frame, checkpoints, (c) => [...series.flatMap((s) => tooltipLines(s, checkpoints.indexOf(c))), plural(series[0].all[checkpoints.indexOf(c)].heads, "head")]);
  };
}

function drawCurves(g, where) {
  const { series, axis, x, y } = where;
  const connected = g.app.data.oneRun;
  for (const s of series) drawBand(g, x, y, s.means, s.spreads, s.colour, connected, [axis.low, axis.high]);
  for (const s of series) drawCurve(g, x, y, s.means, { ...s, connected });
  for (const s of series) drawErrors(g, x, y, s.means, s.errors, [axis.low, axis.high]);
}

function drawBars(g, { series, axis, x, y, step }) {
  const wide = Math.min(34, (step * 0.8) / series.length);
  const inside = (value) => y(Math.max(axis.low, Math.min(axis.high, value)));
  const base = inside(0);
  series.forEach((s, place) => {
    s.means.forEach((mean, i) => {
      const left = x(i) + (place - series.length / 2) * wide;
      const middle = left + wide / 2;
      if (mean === undefined) return;
      if (!Number.isFinite(mean)) {
        g.pen.text("?", middle, base - 4, { size: 11, anchor: "middle", fill: g.theme.muted });
        return;
      }
      g.pen.rect(left + 0.5, Math.min(base, y(mean)), Math.max(1, wide - 1), Math.abs(y(mean) - base), { fill: s.colour, alpha: 0.85 });
      if (Number.isFinite(s.spreads[i])) g.pen.line([[middle, inside(mean - s.spreads[i])], [middle, inside(mean + s.spreads[i])]], { stroke: g.theme.line, width: Math.min(5, wide / 3), alpha: 0.7 });
      if (Number.isFinite(s.errors[i])) g.pen.line([[middle, inside(mean - s.errors[i])], [middle, inside(mean + s.errors[i])]], { stroke: g.theme.ink, width: 1.2 });
    });
  });
}

function seriesTable(app, columns) {
  const { data, selection, store } = app;
  const rows = selection.checkpoints().map((c) => {
    const all = columns.map((column) => overHeads(app, column, c));
    return [data.checkpoints[c].name, data.window(store.state.choice, c), ...all.flatMap((s) => [s.mean, s.spread, s.count, s.exact ? s.error : NaN])];
  });
  return { columns: ["model", "window", ...columns.flatMap(({ name }) => [name, `${name}_std`, `${name}_heads`, `${name}_se`])], rows };
}

function spoken(app, columns) {
  return toldOf(app)
    .map((c) => `${app.data.checkpoints[c].label}: ${columns.map((column) => `mean ${column.title} ${significant(overHeads(app, column, c).mean, 3)}`).join(", ")}`)
    .join("; ");
}

// What a view of this kind is made of, for View.
export function seriesSpec(app, { kind, columns, title }) {
  const curve = kind === "curve";
  return {
    surface: "svg",
    uses: [],
    height: () => HEIGHT,
    draw: drawSeries(columns, curve ? { bars: false, draw: drawCurves } : { bars: true, draw: drawBars }),
    table: () => seriesTable(app, columns),
    label: () => `${title}: means over heads by ${app.data.noun}, as ${!curve ? "bars" : app.data.oneRun ? "lines" : "points"}. ${spoken(app, columns)}`,
    note: () => "",
  };
}
