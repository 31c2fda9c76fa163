// The main chart of training: mean r_q and r_k by layer type, native context length and common window in one picture.

import { View } from "./view.js";
import { checkbox, select } from "./dom.js";
import { checkpointAxis, columnHits, currentColumn, drawErrors, layLabels, scale, valueAxis } from "./axis.js";
import { correlation, plural } from "./format.js";
import { curveFrame, drawCurve, errorNote, spoken, trajectoryTable } from "./curves.js";
import { estimate } from "./numbers.js";

const STATISTICS = [["r_q", "circle", -1], ["r_k", "square", 1]];
const SIDES = [40, 12]; // pixels to the left and to the right of a panel
const TICKS = [-1, -0.5, 0, 0.5, 1];

// The layer types that have a panel each; null stands for all heads together.
function panelsOf(app) {
  return app.store.state.split && app.layerKinds.length > 1 ? app.layerKinds : [null];
}

// Windows that are drawn: [choice, whether it is the hollow one].
function shownChoices(app) {
  const { choice, both } = app.store.state;
  return both && app.data.choices.common ? [["own", false], ["common", true]] : [[choice, choice === "common"]];
}

function errorOf(app, checkpoint, name, kind, choice) {
  return kind === null ? app.summaries.error(checkpoint, name, { choice }) : app.summaries.kindError(checkpoint, name, kind, choice);
}

// The middle half of the heads at native length, as a pale bar beside the mean: bars of two colours never mix.
function drawHalves(g, x, y, checkpoints, kind) {
  const choice = shownChoices(g.app)[0][0];
  for (const [name, , side] of STATISTICS) {
    checkpoints.forEach((c, i) => {
      const ends = g.app.summaries.middleHalf(c, name, { choice, kind });
      if (ends) g.pen.line([[x(i) + 4 * side, y(ends[0])], [x(i) + 4 * side, y(ends[1])]], { stroke: colourOf(g.app, name), width: 4, alpha: 0.2 });
    });
  }
}

function colourOf(app, name) {
  return name === "r_q" ? app.data.about.colours.blue : app.data.about.colours.red;
}

function seriesOf(app, checkpoints, kind) {
  return shownChoices(app).flatMap(([choice, hollow]) =>
    STATISTICS.map(([name, mark]) => ({
      name, mark, hollow, choice, colour: colourOf(app, name),
      means: checkpoints.map((c) => app.summaries.at(c, { kind, choice })[name].mean),
      errors: checkpoints.map((c) => errorOf(app, c, name, kind, choice)),
    })),
  );
}

// What the context length contributes: between native length and the common window.
function drawGap(g, x, y, series) {
  for (const [name] of STATISTICS) {
    const [own, common] = ["own", "common"].map((choice) => series.find((s) => s.name === name && s.choice === choice));
    if (!own || !common) continue;
    const known = own.means.map((_, i) => i).filter((i) => Number.isFinite(own.means[i] + common.means[i]));
    if (known.length < 2 || !g.app.data.oneRun) continue;
    const there = known.map((i) => [x(i), y(own.means[i])]);
    const back = known.map((i) => [x(i), y(common.means[i])]).reverse();
    g.pen.polygon([...there, ...back], { fill: own.colour, alpha: 0.12 });
  }
}

function lines(app, c, kind) {
  const said = shownChoices(app).flatMap(([choice], place) =>
    STATISTICS.map(([name]) => {
      const s = app.summaries.at(c, { kind, choice })[name];
      const where = place ? "common window: " : "";
      return `${where}mean ${name} ${estimate(s.mean, errorOf(app, c, name, kind, choice), 3)}${Number.isFinite(s.spread) ? `, SD over heads ${correlation(s.spread)}` : ""}`;
    }),
  );
  return [...(kind ? [kind] : []), ...said, plural(app.summaries.at(c, { kind }).heads, "head")];
}

function keyOf(g, all) {
  const { blue, red } = g.app.data.about.colours;
  const shown = shownChoices(g.app);
  const names = [["mean r_q", blue, "circle"], ["mean r_k", red, "square"]].map(([text, colour, mark]) => ({ text, colour, mark, hollow: shown[0][1] }));
  const both = shown.length > 1 ? [{ text: "native length", colour: g.theme.muted, mark: "circle" }, { text: g.width < 480 ? "common window (hollow)" : "common window (hollow); shaded: the difference", colour: g.theme.muted, mark: "circle", hollow: true, dash: [4, 3] }] : [];
  const errors = all.some((series) => series.some((s) => s.errors.some(Number.isFinite))) ? [{ text: "± 1 SE over documents", bar: true }] : [];
  return [...names, ...both, { text: "middle half of heads", fill: g.theme.line }, ...errors];
}

// The labels below a panel of this width.
function labelsOf(app, checkpoints, width) {
  return layLabels(checkpoints.map((c) => app.data.checkpoints[c].label), width / checkpoints.length, SIDES[0]);
}

function drawPanel(g, frame, kind, series, bottom) {
  const { app } = g;
  const checkpoints = app.selection.checkpoints();
  const y = scale([bottom, 1], [frame.bottom, frame.top]);
  currentColumn(g, frame, checkpoints);
  valueAxis(g, frame, y, TICKS.filter((tick) => tick >= bottom - 1e-9), (v) => correlation(v, 1));
  const layout = labelsOf(app, checkpoints, frame.right - frame.left);
  const { x } = checkpointAxis(g, frame, checkpoints, layout);
  drawGap(g, x, y, series);
  drawHalves(g, x, y, checkpoints, kind);
  const connected = app.data.oneRun;
  for (const s of [...series].reverse()) drawCurve(g, x, y, s.means, { ...s, dash: s.hollow ? [4, 3] : [], connected });
  for (const s of series) drawErrors(g, x, y, s.means, s.errors, [bottom, 1]);
  if (kind) g.pen.text(`mean r_q and mean r_k (${kind}), ${plural(app.summaries.at(checkpoints.at(-1), { kind }).heads, "head")}`, frame.left, frame.top - 20, { size: 12.5, weight: 650, fill: g.theme.ink });
  return columnHits(g, frame, checkpoints, (c) => lines(app, c, kind));
}

function draw(g) {
  const { app } = g;
  const kinds = panelsOf(app);
  const checkpoints = app.selection.checkpoints();
  const all = kinds.map((kind) => seriesOf(app, checkpoints, kind));
  const { frame } = curveFrame(g, checkpoints, keyOf(g, all));
  const lowest = Math.min(0, ...all.flat().flatMap((s) => s.means.map((m, i) => m - (s.errors[i] || 0))).filter(Number.isFinite));
  const bottom = lowest < -0.55 ? -1 : lowest < -0.05 ? -0.5 : 0;
  const columns = columnsOf(g.width, kinds.length);
  const rows = Math.ceil(kinds.length / columns);
  const [wide, top, tall] = [g.width / columns, frame.top + (kinds.length > 1 ? 14 : 0), g.height - frame.top];
  const labels = labelsOf(app, checkpoints, wide - SIDES[0] - SIDES[1]).height;
  return kinds.flatMap((kind, i) => {
    const [column, row] = [i % columns, Math.floor(i / columns)];
    const place = { left: column * wide + SIDES[0], right: (column + 1) * wide - SIDES[1], top: top + (row * tall) / rows + (row ? 26 : 0), bottom: frame.top + ((row + 1) * tall) / rows - labels };
    return drawPanel(g, place, kind, all[i], bottom);
  });
}

function columnsOf(width, kinds) {
  return width >= 620 ? Math.min(kinds, 3) : 1;
}

function heightOf(app, width) {
  const kinds = panelsOf(app).length;
  const rows = Math.ceil(kinds / columnsOf(width, kinds));
  return (width < 620 ? 110 : 62) + rows * (rows > 1 ? 265 : 300); // the key, and rows of panels
}

const AXES = { order: "in order", step: "by step", "log step": "by step, log", trained_tokens: "by tokens", "log trained_tokens": "by tokens, log" };

export function signalView(app) {
  const { data, store } = app;
  const options = [];
  if (app.layerKinds.length > 1) {
    const byType = checkbox("by layer type", store.state.split, (on) => store.set({ split: on }));
    store.subscribe((changed) => changed.has("split") && (byType.firstElementChild.checked = store.state.split));
    options.push(byType);
  }
  if (data.axes.length > 1) {
    const axis = select(`${data.Noun}s along the axis`, data.axes.map((key) => [key, `${data.noun}s ${AXES[key]}`]), (value) => store.set({ axis: value }));
    axis.id = "axis";
    axis.value = store.state.axis;
    store.subscribe((changed) => changed.has("axis") && (axis.value = store.state.axis));
    options.push(axis);
  }
  return new View(app, {
    id: "signal", title: "How closely queries and keys track position", surface: "svg", card: "position_signal", options, draw,
    about: "Means over heads.",
    uses: ["checkpoint", "component", "choice", "both", "layers", "hidden", "brush", "split", "axis", "theme"],
    height: (width) => heightOf(app, width),
    table: () => trajectoryTable(app, shownChoices(app).map(([choice]) => choice)),
    note: () => errorNote(app),
    label: () => `Mean r_q and r_k by ${data.noun}. ${spoken(app, ["r_q", "r_k"])}`,
  });
}
