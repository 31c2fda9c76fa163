// One head: where its queries and keys lie by position, which keys win, and a sentence about both.

import { View } from "./view.js";
import { drawWindows, shownWindows, stackedHeight } from "./both_windows.js";
import { drawProfile, drawScoreMap, profileRows } from "./detail_charts.js";
import { element } from "./dom.js";
import { inWords } from "./in_words.js";

// The head that is shown: the chosen one, else the one whose queries and keys track position most closely.
export function shownHead(app) {
  const { data, store } = app;
  const { head, checkpoint, component, choice } = store.state;
  if (head !== null) return head;
  const { r_q: q, r_k: k } = data.choices[choice];
  const score = (h) => Math.min(Math.abs(q[data.at(checkpoint, component, h)]), Math.abs(k[data.at(checkpoint, component, h)]));
  let best = 0;
  for (let h = 1; h < data.nHeads; h += 1) if (score(h) > score(best) || !Number.isFinite(score(best))) best = h;
  return best;
}

// The checkpoint whose details are shown: the one on the slider, else the nearest that has some.
function shownCheckpoint(app, table) {
  const { checkpoints, tables } = app.data.about.data.detail;
  const { checkpoint } = app.store.state;
  const kept = tables[table] ? checkpoints : [];
  return [...kept].sort((a, b) => Math.abs(a - checkpoint) - Math.abs(b - checkpoint))[0] ?? checkpoint;
}

// The chart at each window that is shown.
function drawDetail(g, table, draw) {
  const { app, details } = g;
  const checkpoint = shownCheckpoint(app, table);
  return drawWindows(g, shownWindows(app, table, checkpoint), checkpoint, (choice) => details.rows(table, choice, checkpoint, shownHead(app)), draw);
}

// The rows behind a drawing of one head (or layer): as in the parquet tables, one line per place.
export function detailTable({ data }, details, { table, windows, checkpoint, unit, ofLayer = false }) {
  const place = ofLayer ? { layer: unit } : { layer: data.layers[unit], head: data.heads[unit] };
  const parts = windows.map((each) => [each, details.rows(table, each, checkpoint, unit)]).filter(([, rows]) => rows);
  const names = parts.length ? Object.keys(parts[0][1]) : [];
  const rows = parts.flatMap(([each, columns]) => columns[names[0]].map((_, i) => [data.checkpoints[checkpoint].name, each, data.window(each, checkpoint), ...Object.values(place), ...names.map((name) => columns[name]?.[i] ?? NaN)]).filter((row) => row.slice(3 + Object.keys(place).length).some(Number.isFinite)));
  return { columns: ["model", "windows", "window", ...Object.keys(place), ...names], rows };
}

function where(app, table) {
  const { data } = app;
  const at = shownCheckpoint(app, table);
  const other = at === app.store.state.checkpoint ? "" : ` (details of ${data.checkpoints[app.store.state.checkpoint].label} are not in this file)`;
  return `${data.name(shownHead(app))} ${data.place(at)}${other}.`;
}

export function oneHeadViews(app) {
  const { tables } = app.data.about.data.detail;
  const common = { surface: "svg", details: true, allHeads: true, uses: ["head", "checkpoint", "component", "choice", "both", "theme"] };
  const unpacking = (g) => g.pen.text("Unpacking …", g.width / 2, g.height / 2, { size: 13, anchor: "middle", fill: g.theme.muted });
  const make = (table, spec, draw) =>
    !tables[table] ? null : new View(app, {
      ...common, ...spec,
      height: (width) => stackedHeight(shownWindows(app, table, shownCheckpoint(app, table)), width, 300),
      draw: (g) => (g.details ? drawDetail(g, table, draw) : (unpacking(g), [])),
      subject: () => app.data.name(shownHead(app)),
      window: () => {
        const windows = shownWindows(app, table, shownCheckpoint(app, table));
        return windows.length > 1 ? "both" : windows[0];
      },
      table: (_, details) => {
        const checkpoint = shownCheckpoint(app, table);
        return detailTable(app, details, { table, windows: shownWindows(app, table, checkpoint), checkpoint, unit: shownHead(app) });
      },
      label: () => `${spec.title}: ${where(app, table)}`,
      note: () => `${where(app, table)} ${typeof spec.says === "function" ? spec.says() : spec.says}`,
    });
  return {
    profile: make("profile", { id: "profile", title: "Projection by position", card: "profile", says: "Projection of queries and keys on PC0: mean and ± 1 SD over tokens." }, (g, rows) => drawProfile(g, profileRows(rows))),
    score: make("map", { id: "score", title: "Score map", card: "score_map", says: () => `Mean score of queries (rows) with keys (columns), compared with the row’s mean. ${tables.map.columns.some((name) => name.endsWith("_se")) ? "Dots: not significantly different from it." : "These tables have no standard errors of it."}` }, drawScoreMap),
  };
}

export function headSentence(app) {
  const node = element("p", { class: "in-words", id: "head-sentence" });
  const update = () => (node.textContent = `${app.data.name(shownHead(app))}: ${inWords(app, shownHead(app))}`);
  app.store.subscribe((changed) => ["head", "checkpoint", "component", "choice"].some((key) => changed.has(key)) && update());
  update();
  return node;
}
