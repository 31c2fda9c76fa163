// Rows of a table about the study at a checkpoint: a value with its interval each, one below the other.

import { LABEL, scale } from "./axis.js";
import { View } from "./view.js";
import { axisOf, extent, significant } from "./numbers.js";
import { shorten } from "./format.js";
import { textWidth } from "./pen.js";

const ROW = 24; // pixels
const LETTERS = 34; // of a row's name

// The rows of the checkpoint on the slider.
function rowsAt(app, { rows }) {
  return rows.filter((row) => row.checkpoint === app.store.state.checkpoint);
}

function interval({ value, low, high }) {
  const known = low !== null && high !== null;
  return `${significant(value ?? NaN)}${known ? ` (${significant(low)} to ${significant(high)})` : ", no interval"}`;
}

// The axis is that of all checkpoints, so that it stays when the slider moves.
function frameOf(declared, rows, width, height) {
  const numbers = declared.rows.flatMap((row) => [row.value, row.low, row.high]).filter((value) => value !== null);
  const axis = axisOf(extent([0, ...numbers]), null, { zero: true });
  const widest = Math.max(0, ...rows.map((row) => textWidth(shorten(row.name, LETTERS), LABEL)));
  const left = Math.min(16 + widest, width * 0.55);
  return { left, right: width - 18, top: 8, bottom: height - 44, axis, x: scale([axis.low, axis.high], [left + 6, width - 24]) };
}

function drawAxis(g, frame, label) {
  const { pen, theme } = g;
  for (const tick of frame.axis.ticks) {
    const at = frame.x(tick);
    pen.line([[at, frame.top], [at, frame.bottom]], { stroke: tick === 0 ? theme.line : theme.faint, width: 1 });
    pen.text(frame.axis.text(tick), at, frame.bottom + 15, { size: LABEL, fill: theme.muted, anchor: "middle" });
  }
  pen.text(label, frame.right, frame.bottom + 34, { size: 12, fill: theme.ink, anchor: "end" });
}

function drawIntervals(declared) {
  return (g) => {
    const { pen, theme, app } = g;
    const rows = rowsAt(app, declared);
    if (!rows.length) return [];
    const frame = frameOf(declared, rows, g.width, g.height);
    drawAxis(g, frame, declared.label);
    return rows.map((row, i) => {
      const y = frame.top + (i + 0.5) * ROW;
      const sure = row.low !== null && row.high !== null && (row.low > 0 || row.high < 0);
      const stroke = theme.ink; // filled: its interval is on one side of 0
      pen.text(shorten(row.name, LETTERS), frame.left - 6, y + 4, { size: LABEL, fill: theme.ink, anchor: "end" });
      if (row.low !== null && row.high !== null) pen.line([[frame.x(row.low), y], [frame.x(row.high), y]], { stroke, width: 2 });
      if (row.value !== null) pen.mark("circle", frame.x(row.value), y, 4, { fill: sure ? stroke : theme.paper, stroke, width: 1.4 });
      return { x: 0, y: y - ROW / 2, w: g.width, h: ROW, lines: [row.name, `${declared.label}: ${interval(row)}`] };
    });
  };
}

// One view; it is drawn like any other, from rows instead of heads.
export function intervalsView(app, declared) {
  const { data, store } = app;
  const here = () => data.place(store.state.checkpoint);
  const view = new View(app, {
    ...declared,
    surface: "svg",
    uses: ["checkpoint", "theme"],
    height: () => 52 + ROW * Math.max(1, rowsAt(app, declared).length),
    draw: drawIntervals(declared),
    table: () => ({
      columns: ["model", "name", "value", "low", "high"],
      rows: declared.rows.map((row) => [data.checkpoints[row.checkpoint].name, row.name, ...[row.value, row.low, row.high].map((value) => value ?? NaN)]),
    }),
    label: () => `${declared.title} ${here()}: ${rowsAt(app, declared).map((row) => `${row.name} ${interval(row)}`).join("; ") || "not measured"}.`,
    note: () => (rowsAt(app, declared).length ? `${declared.definition} Lines are 95 % intervals; filled marks: without 0.` : `Not measured ${here()}.`),
  });
  view.node.classList.add("view-intervals");
  return view;
}
