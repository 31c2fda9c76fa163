// The layer x head map of a checkpoint: every head in its place, coloured by r_q, r_k or category.

import { View } from "./view.js";
import { attachCells, cellsHeight, drawCells } from "./cells.js";
import { categoryPaint, correlationColour, isNegative, markWords } from "./colours.js";
import { correlation } from "./format.js";
import { headLines } from "./explorer.js";
import { segmented } from "./dom.js";

const LETTERS = ["P", "Q", "K", "C", "M", "?"]; // beside colour, for readers who see it differently

function paintOf(app, theme) {
  const { data, store } = app;
  const { measure, checkpoint, component, choice } = store.state;
  const byCategory = measure === "category";
  return (h) => {
    const value = data.choices[choice][measure][data.at(checkpoint, component, h)];
    if (byCategory ? value === data.undefinedCode : !Number.isFinite(value)) return { fill: null, text: "?" };
    if (byCategory) return { fill: categoryPaint(data, value, theme).fill, text: LETTERS[value] };
    return { fill: correlationColour(data.about, measure, value), text: isNegative(value) ? "−" : "" };
  };
}

export function headMap(app) {
  const { store, data } = app;
  const control = segmented("Colour of the map", [["category", "category"], ["r_q", "r_q"], ["r_k", "r_k"]], (measure) => store.set({ measure }));
  control.update(store.state.measure);
  store.subscribe((changed) => changed.has("measure") && control.update(store.state.measure));
  const letters = data.categories.map((c, i) => `${LETTERS[i]} ${c.name}`).join(", ");
  return new View(app, {
    id: "map",
    title: "Layers and heads",
    about: "Heads across, layers downwards. Drag to keep a block of heads.",
    surface: "canvas",
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "measure", "theme"],
    card: null,
    options: [control.node],
    height: () => cellsHeight(app),
    draw: (g) => drawCells(g, paintOf(app, g.theme)),
    table: () => app.headTable(store.state.checkpoint, true),
    attach: (view) => attachCells(view, headLines),
    label: () => `Map of ${data.nLayers} layers by ${data.nColumns} heads at ${data.checkpoints[store.state.checkpoint].label}, coloured by ${store.state.measure}. Arrow keys move, Enter selects.`,
    note: () =>
      store.state.measure === "category"
        ? `${letters}. ${markWords(app.layerKinds)}`
        : `From ${correlation(0, 0)} (pale) to 1 (dark); below 0 in the other hue, with a minus sign.`,
  });
}
