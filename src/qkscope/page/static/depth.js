// Mean r_q and r_k by checkpoint and depth, with the values printed where they fit.

import { View } from "./view.js";
import { correlation, percent, shorten } from "./format.js";
import { readableOn, signedColour } from "./colours.js";
import { estimate } from "./numbers.js";
import { phaseRuns } from "./axis.js";
import { textWidth } from "./pen.js";

const USES = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];
const [TOP, BOTTOM] = [8, 40];

function rowHeight(app) {
  return Math.max(4, Math.min(26, 560 / app.selection.checkpoints().length));
}

// Layers whose depth falls into a bin: brushing a column keeps them.
function layersOfBin(data, checkpoint, bin) {
  const layers = data.layers.filter((_, h) => data.number("depth_cell", checkpoint, h) === bin);
  return layers.length ? [Math.min(...layers), Math.max(...layers)] : null;
}

function drawHatch(pen, theme, x, y, w, h) {
  pen.rect(x, y, w, h, { stroke: theme.faint, width: 1 });
  for (let at = 4; at < w; at += 6) pen.line([[x + at, y], [x + at - Math.min(4, h), y + h]], { stroke: theme.hatch, width: 0.6 });
}

function drawDepth(statistic) {
  return (g) => {
    const { pen, theme, app } = g;
    const { data, store, selection, summaries } = app;
    const checkpoints = selection.checkpoints();
    const letters = g.width < 520 ? 10 : 22;
    const names = checkpoints.map((c) => shorten(data.checkpoints[c].label, letters));
    const down = rowHeight(app);
    const left = Math.ceil(Math.max(...names.map((name) => textWidth(name, 11.5)))) + 14;
    const { byLayer, columns } = data.about.depth;
    const bins = columns.length;
    const across = (g.width - left - 8) / bins;
    const every = Math.ceil(13 / down);
    const now = checkpoints.indexOf(store.state.checkpoint);
    const gap = down >= 10 ? 1 : 0;
    const hits = [];
    checkpoints.forEach((c, row) => {
      const y = TOP + row * down;
      const current = c === store.state.checkpoint;
      if (current || (row % every === 0 && (now < 0 || Math.abs(row - now) >= every))) pen.text(names[row], left - 8, y + down / 2 + 4, { size: 11.5, anchor: "end", fill: current ? theme.ink : theme.muted, weight: current ? 650 : 400 });
      summaries.depth(c, statistic).forEach((value, bin) => {
        const x = left + bin * across;
        if (Number.isFinite(value)) {
          const fill = signedColour(data.about, value);
          pen.rect(x + 0.5, y + gap / 2, across - 1, down - gap, { fill });
          if (down >= 13 && across >= 30) pen.text(correlation(value), x + across / 2, y + down / 2 + 4, { size: 10.5, anchor: "middle", fill: readableOn(fill) });
        } else drawHatch(pen, theme, x + 0.5, y + 0.5, across - 1, Math.max(1, down - 1));
        const layers = layersOfBin(data, c, bin);
        const range = layers ? `layers ${layers[0]} to ${layers[1]}` : "no layer in this bin";
        const place = byLayer ? `layer ${bin}` : `depth ${percent(bin / bins)} to ${percent((bin + 1) / bins)} (${range})`;
        hits.push({ x, y, w: across, h: down, lines: [data.checkpoints[c].label, place, Number.isFinite(value) ? `mean ${statistic} ${estimate(value, summaries.depthError(c, statistic, bin), 3)}` : "no heads", "click: select these layers"], click: () => layers && store.set({ checkpoint: c, layers }) });
      });
    });
    for (const [, first] of phaseRuns(data, checkpoints).slice(1)) pen.line([[0, TOP + first * down], [g.width, TOP + first * down]], { stroke: theme.line, width: 1, dash: [3, 3] });
    const end = TOP + checkpoints.length * down;
    const step = Math.max(1, Math.ceil(24 / across));
    for (let bin = 0; bin <= bins - (byLayer ? 1 : 0); bin += step) {
      const [text, at] = byLayer ? [String(bin), bin + 0.5] : [(bin / bins).toFixed(1), bin];
      pen.text(text, left + at * across, end + 16, { size: 11, anchor: bin === bins ? "end" : "middle", fill: theme.muted });
    }
    pen.text(byLayer ? "layer" : "depth (0 first layer, 1 last)", g.width - 8, end + 33, { size: 12, anchor: "end", fill: theme.ink });
    return hits;
  };
}

function depthTable(app, statistic) {
  const columns = ["model", ...app.data.about.depth.columns];
  return { columns, rows: app.selection.checkpoints().map((c) => [app.data.checkpoints[c].name, ...app.summaries.depth(c, statistic)]) };
}

export function depthViews(app) {
  const make = (statistic, what) =>
    new View(app, {
      id: `depth-${statistic.replace("_", "")}`, surface: "svg", uses: USES, title: `Mean ${statistic} by ${app.data.about.depth.byLayer ? "layer" : "depth"}`,
      about: `${what}, ${app.data.about.depth.byLayer ? "layer by layer" : "in ten bins from the first layer to the last"}. Click a cell to select its layers.`,
      card: `layer_heatmap_${statistic.replace("_", "")}`,
      height: () => Math.ceil(TOP + BOTTOM + app.selection.checkpoints().length * rowHeight(app)),
      draw: drawDepth(statistic),
      table: () => depthTable(app, statistic),
      label: () => `Mean ${statistic} by ${app.data.noun} and depth; the CSV download has all values.`,
      note: () => (statistic === "r_q" ? "Green above 0, brown below; hatched: no heads." : "Same colors."),
    });
  return [make("r_q", "Queries"), make("r_k", "Keys")];
}
