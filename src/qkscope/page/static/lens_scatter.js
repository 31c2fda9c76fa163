// Two columns of a lens against each other at a checkpoint, one mark per head, coloured as in the portrait.

import { LABEL, scale, valueAxis } from "./axis.js";
import { attachMarkKeys, choose, nearest, point } from "./pointing.js";
import { axisOf } from "./numbers.js";
import { columnLines, columnTable } from "./columns.js";
import { dotRadius, drawDots } from "./portrait.js";
import { plural } from "./format.js";
import { textWidth } from "./pen.js";

const CROWD = 200; // beyond so many heads only the marked ones show their errors

// Axes that stay when the slider moves, with room for marks at their ends.
function frameOf(app, [across, up], width, height) {
  const [x, y] = [axisOf(across.range, across.limits), axisOf(up.range, up.limits)];
  const left = 32 + Math.max(...y.ticks.map((tick) => textWidth(y.text(tick), LABEL)));
  const frame = { left, right: width - 14, top: 14, bottom: height - 44 };
  return {
    ...frame,
    ticks: { x, y },
    x: scale([x.low, x.high], [frame.left + 8, frame.right - 8]),
    y: scale([y.low, y.high], [frame.bottom - 8, frame.top + 8]),
  };
}

function drawAxes(g, frame, [across, up]) {
  const { pen, theme } = g;
  valueAxis(g, frame, frame.y, frame.ticks.y.ticks, frame.ticks.y.text);
  for (const tick of frame.ticks.x.ticks) {
    const at = frame.x(tick);
    pen.line([[at, frame.top], [at, frame.bottom]], { stroke: tick === 0 ? theme.line : theme.faint, width: 1 });
    pen.text(frame.ticks.x.text(tick), at, frame.bottom + 15, { size: LABEL, fill: theme.muted, anchor: "middle" });
  }
  pen.text(across.label, frame.right, frame.bottom + 34, { size: 12, fill: theme.ink, anchor: "end" });
  pen.text(up.label, 12, frame.top, { size: 12, fill: theme.ink, anchor: "end", rotate: -90 });
}

// One standard error to either side.
function drawErrors(g, frame, { mask, x, y, checkpoint }, [across, up]) {
  const { state } = g.app.store;
  const crowded = mask.length > CROWD;
  for (const h of mask.keys()) {
    const marked = h === state.head || h === state.hover;
    if (!Number.isFinite(x[h] + y[h]) || !(marked || (mask[h] && !crowded))) continue;
    const style = { stroke: marked ? g.theme.ink : g.theme.line, width: 1, alpha: marked ? 0.9 : 0.5 };
    const [dx, dy] = [across.errorAt(state, checkpoint, h), up.errorAt(state, checkpoint, h)];
    if (Number.isFinite(dx)) g.pen.line([[frame.x(x[h] - dx), frame.y(y[h])], [frame.x(x[h] + dx), frame.y(y[h])]], style);
    if (Number.isFinite(dy)) g.pen.line([[frame.x(x[h]), frame.y(y[h] - dy)], [frame.x(x[h]), frame.y(y[h] + dy)]], style);
  }
}

// Where the two columns are equal.
function drawDiagonal(g, frame) {
  const [low, high] = [Math.max(frame.ticks.x.low, frame.ticks.y.low), Math.min(frame.ticks.x.high, frame.ticks.y.high)];
  if (low < high) g.pen.line([low, high].map((value) => [frame.x(value), frame.y(value)]), { stroke: g.theme.line, width: 1, dash: [4, 3] });
}

function drawScatter(columns, diagonal) {
  return (g) => {
    const { data, store, selection } = g.app;
    const { checkpoint } = store.state;
    const frame = frameOf(g.app, columns, g.width, g.height);
    const [x, y] = columns.map((column) => data.layers.map((_, h) => column.at(store.state, checkpoint, h)));
    const scene = { mask: selection.mask(checkpoint), x, y, checkpoint, radius: dotRadius(data.nHeads, g.width) };
    drawAxes(g, frame, columns);
    if (diagonal) drawDiagonal(g, frame);
    drawErrors(g, frame, scene, columns);
    drawDots(g, frame, scene);
  };
}

function attach(view, columns) {
  const { app, surface } = view;
  const { store, selection } = app;
  const lines = columnLines(columns);
  const placesOf = () => {
    const frame = frameOf(app, columns, view.width, view.height);
    const value = (column, h) => column.at(store.state, store.state.checkpoint, h);
    return (h) => [frame.x(value(columns[0], h)), frame.y(value(columns[1], h))];
  };
  const headAt = (event) => nearest(placesOf(), selection.mask(store.state.checkpoint), view.place(event));
  surface.addEventListener("pointermove", (event) => point(view, headAt(event), event, lines));
  surface.addEventListener("pointerleave", () => store.set({ hover: null }));
  surface.addEventListener("click", (event) => choose(view, headAt(event)));
  attachMarkKeys(view, "scatter plot", placesOf, lines);
}

export function scatterSpec(app, { columns, title, diagonal = false }) {
  const { data, store, selection } = app;
  return {
    surface: "canvas",
    categories: () => true,
    uses: ["head", "hover"],
    height: (width) => Math.round(Math.min(460, Math.max(300, width * 0.8))),
    draw: drawScatter(columns, diagonal),
    table: () => columnTable(app, columns),
    attach: (view) => attach(view, columns),
    label: () => `${title}: ${columns[0].label} across, ${columns[1].label} up, ${plural(selection.count(store.state.checkpoint), "head")} ${data.place(store.state.checkpoint)}. Arrow keys move between heads, Enter selects, Escape clears.`,
    note: (undefinedHeads) => `Colors and shapes as in “Queries against keys”.${undefinedHeads ? ` ${plural(undefinedHeads, "head")} without a defined value cannot be placed.` : ""}`,
  };
}
