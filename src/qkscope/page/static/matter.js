// Does it matter? Components of scores, what the model loses without a head's position, and plasticity.

import { View } from "./view.js";
import { checkpointAxis, columnHits, currentColumn, scale, valueAxis } from "./axis.js";
import { columnTable } from "./columns.js";
import { curveFrame } from "./curves.js";
import { drawPairs, drawPlasticity } from "./detail_charts.js";
import { meanAndSpread } from "./stats.js";
import { percent, plural } from "./format.js";
import { readableOn } from "./colours.js";
import { scatterSpec } from "./lens_scatter.js";
import { detailTable, shownHead } from "./onehead.js";
import { shareEstimate } from "./numbers.js";

const SHARES = ["position_share", "query_position_share", "preference_share", "query_share"]; // from the bottom of a bar
const EDITS = ["kernel", "kernel_measured", "key_mean", "query_mean", "flatten", "zero"]; // the first that was measured is shown
const USES = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];

// Mean of each share over the shown heads, and the error of the mean where it is known.
function sharesAt(app, columns, checkpoint) {
  const { store, selection } = app;
  const mask = selection.mask(checkpoint);
  const heads = Array.from(mask.keys()).filter((h) => mask[h]);
  return columns.map((column) => {
    const { mean } = meanAndSpread(heads.map((h) => column.at(store.state, checkpoint, h)));
    const exact = selection.allHeads ? column.meanErrorAt(store.state, checkpoint) : NaN;
    const atMost = meanAndSpread(heads.map((h) => column.errorAt(store.state, checkpoint, h))).mean;
    return { mean, error: Number.isFinite(exact) ? exact : atMost, exact: Number.isFinite(exact) };
  });
}

function drawShares(columns) {
  return (g) => {
    const { app } = g;
    const checkpoints = app.selection.checkpoints();
    const key = columns.map(({ title, color }) => ({ text: title, fill: color, alpha: 1 }));
    const { frame, layout } = curveFrame(g, checkpoints, [...key, { text: "± 1 SE over documents", bar: true }]);
    const y = scale([0, 1], [frame.bottom, frame.top]);
    currentColumn(g, frame, checkpoints, true);
    valueAxis(g, frame, y, [0, 0.25, 0.5, 0.75, 1], (v) => percent(v));
    const { x, step } = checkpointAxis(g, frame, checkpoints, layout, true);
    const wide = Math.max(1, Math.min(64, step * (step > 12 ? 0.78 : 0.98)));
    const all = checkpoints.map((c) => sharesAt(app, columns, c));
    all.forEach((shares, i) => {
      let low = 0;
      shares.forEach(({ mean, error }, part) => {
        if (!Number.isFinite(mean)) return;
        const high = low + mean;
        g.pen.rect(x(i) - wide / 2, y(high), wide, y(low) - y(high), { fill: columns[part].color, stroke: g.theme.paper, width: wide > 8 ? 0.8 : 0 });
        if (wide >= 30 && y(low) - y(high) > 13) g.pen.text(percent(mean), x(i), (y(low) + y(high)) / 2 + 4, { size: 11, anchor: "middle", fill: readableOn(columns[part].color) });
        const at = x(i) - wide / 2 + (wide * (part + 1)) / (shares.length + 1);
        if (Number.isFinite(error) && part < shares.length - 1) g.pen.line([[at, y(high - error)], [at, y(high + error)]], { stroke: g.theme.ink, width: 1.2 });
        low = high;
      });
    });
    return columnHits(g, frame, checkpoints, (c) => [
      ...all[checkpoints.indexOf(c)].map(({ mean, error, exact }, i) => `${columns[i].title} ${shareEstimate(mean, error, { atMost: !exact })}`),
      plural(app.selection.count(c), "head"),
    ], true);
  };
}

function scoreSplit(app) {
  const columns = SHARES.map((name) => app.data.columns.get(name));
  if (columns.some((column) => !column)) return null;
  return new View(app, {
    id: "score-split", title: "Components of attention scores", surface: "svg", card: "score_components", uses: USES, height: (width) => (width > 500 ? 440 : 340),
    about: "Share of the variance of a query’s scores over the keys it sees: key position, key content, query. Means over heads.",
    draw: drawShares(columns),
    table: () => columnTable(app, columns),
    label: () => `Components of attention scores. ${sharesAt(app, columns, app.store.state.checkpoint).map(({ mean }, i) => `${columns[i].title} ${percent(mean)}`).join(", ")}`,
  });
}

// The loss against a measure of position, one mark per head: the first edit that was measured.
function ablation(app) {
  const { data } = app;
  const measured = (column) => Object.values(column.values).some((values) => values?.some(Number.isFinite));
  const loss = EDITS.map((edit) => data.columns.get(`loss_${edit}`)).find((column) => column && measured(column));
  if (!loss) return null;
  const across = data.columns.get("position_share") ?? app.statistics.r_q;
  const title = "Loss increase without a head’s positional information";
  const spec = scatterSpec(app, { columns: [across, loss], title });
  const where = data.checkpoints.map((_, c) => c).filter((c) => data.layers.some((_, h) => Number.isFinite(loss.at({ choice: "own", component: 0 }, c, h))));
  return new View(app, {
    ...spec, id: "ablation", title, card: "loss", window: () => "own", uses: [...USES, ...spec.uses],
    about: `${loss.definition} Above 0 the model is worse without it.`,
    note: () => `Measured at native context length at ${where.map((c) => data.checkpoints[c].label).join(", ")}. Crosses: ± 1 standard error over documents. ${where.includes(app.store.state.checkpoint) ? "" : "Move the slider there."}`,
  });
}

const shownLayer = (app) => app.data.layers[shownHead(app)];

function plasticity(app) {
  const { detail } = app.data.about.data;
  const { data, store } = app;
  const at = () => [...detail.checkpoints].sort((a, b) => Math.abs(a - store.state.checkpoint) - Math.abs(b - store.state.checkpoint))[0];
  const common = { surface: "svg", details: true, allHeads: true, uses: ["head", "checkpoint", "component", "choice", "theme"], height: () => 280 };
  const head = () => shownHead(app);
  const make = (table, spec, draw, unit) => !detail.tables[table] ? null : new View(app, {
    ...common, ...spec,
    draw: (g) => (g.details ? draw(g, g.details.rows(table, store.state.choice, at(), unit())) : []),
    subject: spec.of,
    table: (_, details) => detailTable(app, details, { table, windows: [store.state.choice], checkpoint: at(), unit: unit(), ofLayer: table === "pairs" }),
    note: () => `${spec.of()} ${data.place(at())}. ${spec.says}`,
    label: () => `${spec.title}: ${spec.of()} ${data.place(at())}`,
  });
  return [
    make("plasticity", { id: "plasticity", title: "Attention plasticity by query position", card: "plasticity", of: () => data.name(head()), says: "How often two queries disagree about which of two earlier keys scores higher. Solid: queries of one position bucket; dashed: queries at the same position. Bars: ± 1 standard error." }, drawPlasticity, head),
    make("pairs", { id: "pairs", title: "Attention plasticity by distance", card: "plasticity", of: () => `heads of layer ${shownLayer(app)}`, says: "Dark: queries often disagree." }, drawPairs, () => shownLayer(app)),
  ];
}

export function matterViews(app) {
  return { score: scoreSplit(app), ablation: ablation(app), plasticity: plasticity(app) };
}
