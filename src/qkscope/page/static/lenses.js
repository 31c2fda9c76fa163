// Of each lens its question, its title, and the views that it declares over its columns.

import { View } from "./view.js";
import { keptWords } from "./columns.js";
import { cellsSpec } from "./lens_cells.js";
import { element } from "./dom.js";
import { intervalsView } from "./lens_intervals.js";
import { scatterSpec } from "./lens_scatter.js";
import { seriesSpec } from "./lens_series.js";
import { bound } from "./numbers.js";

const KINDS = { curve: seriesSpec, bars: seriesSpec, heatmap: cellsSpec, scatter: scatterSpec };
const USES = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];

// What the columns of a view mean.
function definitions(columns) {
  const bounds = ({ limits }) => {
    const [low, high] = limits ?? [null, null];
    if (low !== null && high !== null) return `from ${bound(low)} to ${bound(high)}`;
    return low !== null ? `at least ${bound(low)}` : high !== null ? `at most ${bound(high)}` : "";
  };
  const entries = columns.map((column) => {
    const more = [column.unit, bounds(column)].filter(Boolean).join(", ");
    return element("div", {}, element("dt", {}, column.title), element("dd", {}, more ? `${column.definition.replace(/\.$/, "")} (${more}).` : column.definition));
  });
  return element("dl", { class: "defines" }, ...entries);
}

// Shown heads of the checkpoint on the slider for which a column has no value.
export function countUndefined(app, columns) {
  const { store, selection } = app;
  const { checkpoint } = store.state;
  return selection.mask(checkpoint).filter((kept, h) => kept && columns.some((c) => !Number.isFinite(c.at(store.state, checkpoint, h)))).length;
}

function lensView(app, declared) {
  const { id, kind, title, about, card, columns } = declared;
  const spec = KINDS[kind](app, declared);
  const note = () => {
    const missing = columns.filter((column) => !column.isAt(app.store.state)).map((column) => column.title);
    return missing.length ? `Not measured at this window: ${missing.join(", ")}.` : keptWords(app) || spec.note(countUndefined(app, columns));
  };
  const view = new View(app, { ...spec, id, title, about, card, note, uses: [...USES, ...spec.uses] });
  view.node.classList.add(`view-${kind}`);
  view.note.before(definitions(columns));
  return view;
}

// Every view that a lens declares, folded under its question: main charts are elsewhere, nothing is left out. Views are
// made when a reader first unfolds them.
export function lensParts(app) {
  return app.data.lenses.filter((lens) => lens.views.length + lens.intervals.length).map((lens) => {
    const inside = element("div", { class: "pair" });
    const fill = () => {
      if (!node.open || inside.childElementCount) return;
      const views = [...lens.views.map((declared) => lensView(app, declared)), ...lens.intervals.map((declared) => intervalsView(app, declared))];
      app.views.push(...views);
      inside.append(...views.map((view) => view.node));
    };
    const node = element("details", { class: "lens", id: `lens-${lens.name}`, on: { toggle: fill } }, element("summary", {}, lens.question), element("p", { class: "intro" }, lens.title), inside);
    return node;
  });
}
