// The layer x head map of a checkpoint: all heads by layer, colored by r_k, r_q, category or any column of a lens.

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

const LETTERS = ["P", "Q", "K", "C", "M", "?"]; // next to color, for readers who see it differently
const FIRST = ["position_share", "late_advantage", "r_q_excess", "loss_kernel", "ap_same_position", "decode_q", "bias_effect"]; // what readers ask for most
const MENU = 10; // measures in the menu

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

// The measures that a reader can choose: ten in the menu, the others by searching their titles.
function measurePicker(app) {
  const { data, store } = app;
  const columns = [...data.columns.values()];
  const drawn = data.lenses.flatMap((lens) => lens.views.flatMap((view) => view.columns));
  const known = new Set(["r_k", "r_q", "category", ...FIRST.filter((name) => data.columns.has(name)), ...drawn.map((column) => column.name)]);
  const first = [...known].slice(0, MENU);
  const titleOf = (name) => data.columns.get(name)?.title ?? name;
  const option = (name) => element("option", { value: name }, titleOf(name));
  const node = element("select", { id: "measure", "aria-label": "Color of the map", on: { change: () => store.set({ measure: node.value }) } });
  const update = () => {
    const { measure } = store.state;
    node.replaceChildren(...first.map(option), ...(first.includes(measure) ? [] : [option(measure)]));
    node.value = measure;
  };
  store.subscribe((changed) => changed.has("measure") && update());
  update();
  const label = element("label", {}, "color ", node);
  const rest = columns.filter((column) => !first.includes(column.name));
  return rest.length ? [label, measureSearch(app, rest)] : [label];
}

// Finds a measure by its title: one of the list, or with Enter the first that has these letters.
function measureSearch(app, columns) {
  const field = element("input", { type: "search", id: "measure-search", list: "measure-titles", placeholder: `search ${columns.length} more`, "aria-label": `Search ${columns.length} more measures`, autocomplete: "off" });
  const find = (test) => columns.find((column) => test(column.title.toLowerCase(), field.value.trim().toLowerCase()));
  const take = (column) => {
    field.setAttribute("aria-invalid", String(Boolean(field.value) && !column));
    if (!column) return;
    app.store.set({ measure: column.name });
    app.announce(`Color: ${column.title}`);
    field.value = "";
  };
  field.addEventListener("input", () => {
    const exact = find((title, words) => title === words);
    if (exact) take(exact);
    else field.setAttribute("aria-invalid", "false");
  });
  field.addEventListener("keydown", (event) => event.key === "Enter" && field.value.trim() && take(find((title, words) => title.includes(words))));
  return element("span", { class: "measure-search" }, field, element("datalist", { id: "measure-titles" }, ...columns.map(({ title }) => element("option", { value: title }))));
}

function note(app) {
  const { data } = app;
  const column = columnOf(app);
  if (!column) return `${data.categories.map((c, i) => `${LETTERS[i]} ${c.name}`).join(", ")}, A position-dominated with ${data.about.against.name}.`;
  const missing = column.isAt(app.store.state) ? "" : " Not measured at this window.";
  const kept = app.statistics[column.name] ? "" : keptWords(app);
  return `${kept}${column.title}: ${column.definition}${missing}`;
}

export function headMap(app) {
  const { store, data } = app;
  app.statistics = {
    r_q: new StatisticColumn(data, "r_q", "Correlation of the projection of queries with position."),
    r_k: new StatisticColumn(data, "r_k", "Correlation of the projection of keys with position; below 0, keys track it in reverse."),
  };
  const lines = (...about) => (columnOf(app) && !app.statistics[store.state.measure] ? [...columnLines([columnOf(app)])(...about), ...headLines(...about).slice(1, 4)] : headLines(...about));
  const picker = measurePicker(app);
  const view = new View(app, {
    id: "map",
    title: "All heads by layer",
    about: "Heads across, layers downwards. Drag to select heads.",
    surface: "canvas",
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "measure", "theme"],
    card: null,
    categories: () => columnOf(app) === null,
    options: picker,
    height: () => cellsHeight(app) + SCALE.height,
    draw,
    table: () => (columnOf(app) && !app.statistics[store.state.measure] ? columnTable(app, [columnOf(app)]) : app.headTable(store.state.checkpoint, true)),
    attach: (each) => attachCells(each, lines),
    label: () => `Map of ${data.nLayers} layers by ${data.nColumns} heads ${data.place(store.state.checkpoint)}, colored by ${columnOf(app)?.title ?? "category"}. Arrow keys move, Enter selects.`,
    note: () => note(app),
  });
  picker.at(-1).after(boxButton(view));
  return view;
}
