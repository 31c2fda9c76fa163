// The layer x head map of a checkpoint: every head in its place, coloured by r_k, r_q, category or any column of a lens.

import { View } from "./view.js";
import { SCALE, colourScale, drawScale } from "./lens_cells.js";
import { StatisticColumn, columnLines, columnTable, keptWords } from "./columns.js";
import { attachCells, cellText, cellsHeight, drawCells } from "./cells.js";
import { boxButton } from "./pointing.js";
import { element } from "./dom.js";
import { headLines } from "./explorer.js";
import { headPaint } from "./colours.js";
import { correlation } from "./format.js";
import { significant } from "./numbers.js";

const LETTERS = ["P", "Q", "K", "C", "M", "?"]; // beside colour, for readers who see it differently
const FIRST = ["position_share", "ap", "r_q_excess", "loss_kernel", "late_advantage"]; // what readers ask for most

function columnOf(app) {
  const { measure } = app.store.state;
  if (measure === "category") return null;
  return app.statistics[measure] ?? app.data.columns.get(measure);
}

function paintCategories(app, theme) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  return (h) => {
    const at = data.at(checkpoint, component, h);
    const code = data.choices[choice].category[at];
    if (code === data.undefinedCode) return { fill: null, text: "?" };
    return { fill: headPaint(data, choice, at, theme).fill, text: data.runsAgainst(choice, at) ? "A" : LETTERS[code] };
  };
}

function draw(g) {
  const { app } = g;
  const { state } = app.store;
  const column = columnOf(app);
  if (!column) {
    drawCells(g, paintCategories(app, g.theme));
    return;
  }
  const colours = colourScale(app, column);
  drawCells(g, (h, place) => {
    const value = column.at(state, state.checkpoint, h);
    if (!Number.isFinite(value)) return { fill: null, text: "?" };
    const number = app.statistics[column.name] ? correlation(value) : significant(value, 2);
    return { fill: colours.of(value), text: cellText(number, place) };
  });
  drawScale(g, colours, column);
}

// The measures that a reader can choose, by what they are about.
function measurePicker(app) {
  const { data, store } = app;
  const option = (value, text) => element("option", { value }, text);
  const first = FIRST.filter((name) => data.columns.has(name));
  const groups = data.lenses.map((lens) => element("optgroup", { label: lens.title }, ...lens.listed.filter((c) => data.columns.get(c.name) === c && !first.includes(c.name)).map((c) => option(c.name, c.name))));
  const node = element(
    "select", { id: "measure", "aria-label": "Colour of the map", on: { change: () => store.set({ measure: node.value }) } },
    option("r_k", "r_k"), option("r_q", "r_q"), option("category", "category"), ...first.map((name) => option(name, name)), ...groups.filter((group) => group.childElementCount),
  );
  node.value = store.state.measure;
  store.subscribe((changed) => changed.has("measure") && (node.value = store.state.measure));
  return element("label", {}, "colour ", node);
}

function note(app) {
  const { data } = app;
  const column = columnOf(app);
  if (!column) return `${data.categories.map((c, i) => `${LETTERS[i]} ${c.name}`).join(", ")}, A position-dominated with keys against.`;
  const missing = column.isAt(app.store.state) ? "" : " Not measured at this window.";
  const kept = app.statistics[column.name] ? "" : keptWords(app);
  return `${kept}${column.name}: ${column.definition}${missing}`;
}

export function headMap(app) {
  const { store, data } = app;
  app.statistics = {
    r_q: new StatisticColumn(data, "r_q", "How closely the projection of queries follows position, from −1 to 1."),
    r_k: new StatisticColumn(data, "r_k", "How closely the projection of keys follows position, from −1 to 1; below 0 they run against it."),
  };
  const lines = (...about) => (columnOf(app) && !app.statistics[store.state.measure] ? [...columnLines([columnOf(app)])(...about), ...headLines(...about).slice(1, 4)] : headLines(...about));
  const picker = measurePicker(app);
  const view = new View(app, {
    id: "map",
    title: "Every head in its place",
    about: "Heads across, layers downwards. Drag to keep a block of heads.",
    surface: "canvas",
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "measure", "theme"],
    card: null,
    categories: () => columnOf(app) === null,
    options: [picker],
    height: () => cellsHeight(app) + SCALE.height,
    draw,
    table: () => (columnOf(app) && !app.statistics[store.state.measure] ? columnTable(app, [columnOf(app)]) : app.headTable(store.state.checkpoint, true)),
    attach: (each) => attachCells(each, lines),
    label: () => `Map of ${data.nLayers} layers by ${data.nColumns} heads ${data.place(store.state.checkpoint)}, coloured by ${store.state.measure}. Arrow keys move, Enter selects.`,
    note: () => note(app),
  });
  picker.after(boxButton(view));
  return view;
}
