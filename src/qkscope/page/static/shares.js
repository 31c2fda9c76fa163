// Categories over training: stacked shares, and the heads that flow from one category to another.

import { View } from "./view.js";
import { categoryColour, categoryPaint, readableOn } from "./colours.js";
import { checkpointAxis, columnHits, currentColumn, layLabels, scale, valueAxis } from "./axis.js";
import { percent, plural } from "./format.js";
import { shareEstimate } from "./numbers.js";

const HEIGHT = 360;
const MOST_FLOWS = 24; // more columns than this are thinned: ribbons would be hairlines
const USES = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];

function frameOf(g, checkpoints) {
  const [left, right] = [44, g.width - 12];
  const layout = layLabels(checkpoints.map((c) => g.app.data.checkpoints[c].label), (right - left) / checkpoints.length, left);
  return { frame: { left, right, top: 24, bottom: g.height - layout.height }, layout };
}

// Where each category's block begins and ends, from the bottom, in the order of the figures.
function blocks(counts) {
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  let sum = 0;
  return counts.map((count) => [sum / total, (sum += count) / total]);
}

function blockStyle(g, code) {
  const paint = categoryPaint(g.app.data, code, g.theme);
  return { ...paint, stroke: paint.stroke ?? g.theme.paper, width: 0.8 };
}

function shareLines(app, c) {
  const s = app.summaries.at(c);
  const share = (category, i) => shareEstimate(s.shares[i], app.summaries.error(c, category.name));
  const withKeys = (i) => (i === 0 && s.against ? `, ${s.against} with ${app.data.about.against.name}` : "");
  const { component } = app.store.state;
  return app.data.categories.map((category, i) => [s.counts[i], `${app.data.categoryName(i, component)} ${share(category, i)} (${s.counts[i]}${withKeys(i)})`]).filter(([n]) => n).map(([, line]) => line);
}

// ± 1 standard error over documents at the upper end of a block (of the highest, at its lower end), each in a place of
// its own so that neighbours do not overlap.
function drawShareError(g, checkpoint, code, [x, y], [low, high]) {
  const error = g.app.summaries.error(checkpoint, g.app.data.categories[code].name);
  const end = high > 1 - 1e-9 ? low : high;
  if (!(error > 0)) return;
  g.pen.line([[x, y(Math.max(0, end - error))], [x, y(Math.min(1, end + error))]], { stroke: g.theme.ink, width: 1.2, part: "error" });
}

function drawStack(g) {
  const { app } = g;
  const checkpoints = app.selection.checkpoints();
  const { frame, layout } = frameOf(g, checkpoints);
  const y = scale([0, 1], [frame.bottom, frame.top]);
  currentColumn(g, frame, checkpoints, true);
  valueAxis(g, frame, y, [0, 0.25, 0.5, 0.75, 1], (v) => percent(v));
  const { x, step } = checkpointAxis(g, frame, checkpoints, layout, true);
  const wide = Math.max(1, Math.min(64, step * (step > 12 ? 0.78 : 0.98)));
  checkpoints.forEach((c, i) => {
    const { counts, shares, against } = app.summaries.at(c);
    blocks(counts).forEach(([low, high], code) => {
      if (high <= low) return;
      const style = wide > 8 ? blockStyle(g, code) : categoryPaint(app.data, code, g.theme);
      g.pen.rect(x(i) - wide / 2, y(high), wide, y(low) - y(high), style);
      if (code === 0 && against) {
        const part = low + ((high - low) * against) / counts[0];
        g.pen.rect(x(i) - wide / 2, y(part), wide, y(low) - y(part), { ...style, fill: categoryColour(app.data.about.against, g.theme) });
      }
      drawShareError(g, c, code, [x(i) - wide / 2 + (wide * (code + 1)) / (counts.length + 1), y], [low, high]);
      if (wide >= 30 && y(low) - y(high) > 13) g.pen.text(percent(shares[code]), x(i), (y(low) + y(high)) / 2 + 4, { size: 11, anchor: "middle", fill: code === app.data.undefinedCode ? g.theme.ink : readableOn(style.fill) });
    });
  });
  return columnHits(g, frame, checkpoints, (c) => shareLines(app, c), true);
}

// The columns of the flow: all checkpoints, or evenly spread ones with the first and the last.
export function flowColumns(checkpoints) {
  const stride = Math.ceil((checkpoints.length - 1) / (MOST_FLOWS - 1)) || 1;
  return checkpoints.filter((_, i) => i === checkpoints.length - 1 || (i % stride === 0 && checkpoints.length - 1 - i >= stride));
}

function ribbon(x0, x1, [top0, bottom0], [top1, bottom1]) {
  const middle = (x0 + x1) / 2;
  return [
    ["M", x0, top0], ["C", middle, top0, middle, top1, x1, top1], ["L", x1, bottom1],
    ["C", middle, bottom1, middle, bottom0, x0, bottom0], ["Z"],
  ];
}

// Ribbons between two columns. Heads leave and arrive in the order of the categories, so ribbons cross little.
function drawRibbons(g, y, [x0, x1], flow, [before, after]) {
  const { data } = g.app;
  const hits = [];
  const total = flow.flat().reduce((a, b) => a + b, 0) || 1;
  const out = blocks(flow.map((row) => row.reduce((a, b) => a + b, 0))).map(([low]) => low);
  const into = blocks(flow.map((_, to) => flow.reduce((sum, row) => sum + row[to], 0))).map(([low]) => low);
  flow.forEach((row, from) =>
    row.forEach((count, to) => {
      if (!count) return;
      const share = count / total;
      const left = [y(out[from] + share), y(out[from])];
      const right = [y(into[to] + share), y(into[to])];
      out[from] += share;
      into[to] += share;
      const { fill } = categoryPaint(data, to, g.theme);
      g.pen.shape(ribbon(x0, x1, left, right), { fill: to === data.undefinedCode ? g.theme.line : fill, alpha: from === to ? 0.16 : 0.5 });
      const [top, bottom] = [(left[0] + right[0]) / 2, (left[1] + right[1]) / 2];
      hits.push({
        x: x0, y: top, w: x1 - x0, h: Math.max(3, bottom - top),
        lines: [`${data.checkpoints[before].label} to ${data.checkpoints[after].label}`, from === to ? `${data.categories[to].name}: ${plural(count, "head")} stay` : `${data.categories[from].name} to ${data.categories[to].name}: ${plural(count, "head")}`],
      });
    }),
  );
  return hits;
}

function drawFlow(g) {
  const { app } = g;
  const checkpoints = flowColumns(app.selection.checkpoints());
  const { frame, layout } = frameOf(g, checkpoints);
  const y = scale([0, 1], [frame.bottom, frame.top]);
  currentColumn(g, frame, checkpoints, true);
  valueAxis(g, frame, y, [0, 0.5, 1], (v) => percent(v));
  const { x, step } = checkpointAxis(g, frame, checkpoints, layout, true);
  const half = Math.max(1.5, Math.min(7, step * 0.12));
  const hits = [];
  for (let i = 0; i + 1 < checkpoints.length; i += 1) {
    const pair = [checkpoints[i], checkpoints[i + 1]];
    hits.push(...drawRibbons(g, y, [x(i) + half, x(i + 1) - half], app.summaries.flow(...pair), pair));
  }
  checkpoints.forEach((c, i) => {
    blocks(app.summaries.at(c).counts).forEach(([low, high], code) => {
      if (high > low) g.pen.rect(x(i) - half, y(high), 2 * half, y(low) - y(high), blockStyle(g, code));
    });
    hits.push({ x: x(i) - half - 2, y: frame.top, w: 2 * half + 4, h: frame.bottom - frame.top, lines: [app.data.checkpoints[c].label, ...shareLines(app, c)], click: () => app.store.set({ checkpoint: c }) });
  });
  return hits;
}

function sharesTable(app) {
  const columns = ["model", "heads", ...app.data.categories.map((c) => c.name)];
  return { columns, rows: app.selection.checkpoints().map((c) => [app.data.checkpoints[c].name, app.summaries.at(c).heads, ...app.summaries.at(c).counts]) };
}

// As tables/transitions.csv: moves that no head made have no row.
function flowTable(app) {
  const { data, selection, summaries } = app;
  const columns = ["from_model", "to_model", "from_category", "to_category", "heads"];
  const list = selection.checkpoints();
  const rows = list.slice(1).flatMap((after, i) =>
    summaries.flow(list[i], after).flatMap((row, from) =>
      row.flatMap((n, to) => (n ? [[data.checkpoints[list[i]].name, data.checkpoints[after].name, data.categories[from].name, data.categories[to].name, n]] : [])),
    ),
  );
  return { columns, rows };
}

function spoken(app) {
  const list = app.selection.checkpoints();
  return [list[0], list[list.length - 1]].map((c) => `${app.data.checkpoints[c].label}: ${shareLines(app, c).join(", ")}`).join("; ");
}

export function shareViews(app) {
  const common = { surface: "svg", categories: () => true, uses: USES, height: () => HEIGHT, card: "taxonomy" };
  const thinned = () => flowColumns(app.selection.checkpoints()).length < app.selection.checkpoints().length;
  return {
    stack: new View(app, {
      ...common, id: "stack", title: "Categories", draw: drawStack, table: sharesTable,
      about: "The share of heads in each category. Error bars: ± 1 standard error over documents.",
      label: () => `Shares of categories. ${spoken(app)}`,
    }),
    flow: !app.data.oneRun || app.data.checkpoints.length < 2 ? null : new View(app, {
      ...common, id: "flow", title: "Category changes", draw: drawFlow, table: flowTable,
      about: "Heads that change category between checkpoints, in the color of their new category. Pale: unchanged.",
      label: () => `Flow of heads between categories. ${spoken(app)}`,
      note: () => (thinned() ? "Not every checkpoint has a column; the CSV has every step." : ""),
    }),
  };
}
