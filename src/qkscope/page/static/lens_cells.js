// One column of a lens, layers by heads, with a scale of its colours.

import { attachCells, cellText, cellsHeight, drawCells } from "./cells.js";
import { axisOf, bound, significant } from "./numbers.js";
import { columnLines, columnTable } from "./columns.js";
import { ramp } from "./colours.js";
import { textWidth } from "./pen.js";

export const SCALE = { height: 34, width: 180, steps: 60 };

// Colours for a column: two hues around 0 where values have both signs or could, else one from low to high.
export function colourScale(app, { range, limits }) {
  const { diverging, sequential } = app.data.about.colours;
  const symmetric = limits !== null && limits[0] !== null && limits[0] === -limits[1];
  if (symmetric || (range && range[0] < 0 && range[1] > 0)) {
    const far = range ? Math.max(Math.abs(range[0]), Math.abs(range[1])) : 1;
    const { high } = axisOf([0, far || 1], limits);
    return { low: -high, high, diverging: true, of: (value) => ramp(diverging, (value / high + 1) / 2) };
  }
  const { low, high } = axisOf(range, limits);
  return { low, high, diverging: false, of: (value) => ramp(sequential, (value - low) / (high - low)) };
}

export function drawScale(g, colours, column) {
  const { pen, theme } = g;
  const top = g.height - SCALE.height + 8;
  const text = { size: 11.5, fill: theme.muted };
  const [low, high] = [bound(colours.low), bound(colours.high)];
  const left = Math.ceil(34 + textWidth(low, text.size) + 7);
  const piece = g.width < 3 * SCALE.width ? 2 : 3; // whole pixels, so that no seams show
  const width = piece * SCALE.steps;
  pen.text(low, 34, top + 10, text);
  for (let i = 0; i < SCALE.steps; i += 1) {
    pen.rect(left + i * piece, top, piece, 12, { fill: colours.of(colours.low + ((i + 0.5) / SCALE.steps) * (colours.high - colours.low)) });
  }
  pen.rect(left, top, width, 12, { stroke: theme.line, width: 0.7 });
  if (colours.diverging) pen.line([[left + width / 2, top], [left + width / 2, top + 15]], { stroke: theme.muted, width: 1 });
  pen.text(high, left + width + 7, top + 10, text);
  const rest = left + width + 7 + textWidth(high, text.size) + 14;
  const label = [column.label, column.title].find((words) => rest + textWidth(words, text.size) <= g.width);
  if (label) pen.text(label, rest, top + 10, { ...text, fill: theme.ink });
}

function drawMap(column) {
  return (g) => {
    const { app } = g;
    const { state } = app.store;
    const colours = colourScale(app, column);
    drawCells(g, (h, place) => {
      const value = column.at(state, state.checkpoint, h);
      if (!Number.isFinite(value)) return { fill: null, text: "?" };
      return { fill: colours.of(value), text: cellText(significant(value, 2), place) };
    });
    drawScale(g, colours, column);
  };
}

export function cellsSpec(app, { columns: [column], title }) {
  const { data, store } = app;
  const lines = columnLines([column]);
  return {
    surface: "canvas",
    uses: ["head", "hover"],
    height: () => cellsHeight(app) + SCALE.height,
    draw: drawMap(column),
    table: () => columnTable(app, [column]),
    attach: (view) => attachCells(view, lines),
    label: () => {
      const [low, high] = (column.range ?? [NaN, NaN]).map(bound);
      return `${title}: map of ${data.nLayers} layers by ${data.nColumns} heads ${data.place(store.state.checkpoint)}, colored by ${column.label}, from ${low} to ${high}. Arrow keys move, Enter selects.`;
    },
    note: (undefinedHeads) => `${undefinedHeads ? "A question mark: undefined. " : ""}Heads across, layers downwards; drag to select heads.`,
  };
}
