// The part of the drawer with single tokens: two axes and a document to choose, the drawing, and what it says in words.

import { axesWords, axisName, collagePoints, drawCollage, farthestWords, tokenAxes } from "./collage.js";
import { element, select } from "./dom.js";
import { plural, whole } from "./format.js";

const ALL = "all";

// The axes that are shown: those of the state where the page has them.
function shownAxes(app) {
  const there = tokenAxes(app.data);
  const { tokenAxes: wanted } = app.store.state;
  return wanted.every((axis) => there.includes(axis)) ? wanted : there.slice(0, 2);
}

// A menu that keeps its focus when the drawer is filled again.
function menu(name, label, choices, chosen, choose) {
  const node = select(label, choices, choose);
  node.dataset.control = name;
  node.value = chosen;
  return element("label", { class: "about" }, `${name} `, node);
}

function axisMenus(app, axes) {
  const choices = tokenAxes(app.data).map((axis) => [axis, axisName(axis)]);
  const choose = (side) => (axis) => {
    const next = axes.includes(axis) ? [axes[1], axes[0]] : axes.with(side, axis); // the axis of the other side: both change places
    app.store.set({ tokenAxes: next });
  };
  return [["across", 0], ["up", 1]].map(([name, side]) => menu(name, `Axis ${name} of the kept tokens`, choices, axes[side], choose(side)));
}

// How many tokens the page has of each document, in order.
function documentsOf(detail) {
  const counts = new Map();
  (detail?.document ?? []).forEach((document) => Number.isFinite(document) && counts.set(document, (counts.get(document) ?? 0) + 1));
  return [...counts].sort(([one], [other]) => one - other);
}

function documentMenu(app, documents, chosen) {
  const choices = [[ALL, "all documents"], ...documents.map(([document, count]) => [String(document), `document ${whole(document)} (${plural(count, "token")})`])];
  const choose = (value) => app.store.set({ tokenDocument: value === ALL ? null : Number(value) });
  return menu("document", "Document that is drawn over the others", choices, chosen === null ? ALL : String(chosen), choose);
}

// What this file lacks.
function lackWords(data, detail) {
  const kept = data.about.data.detail.tables.sample.own;
  if (!detail) return `This file has kept tokens of ${kept.map((c) => data.checkpoints[c].label).join(", ")}.`;
  const components = tokenAxes(data).filter((axis) => axis.startsWith("pc")).length;
  return components < data.components.length ? `This file has kept tokens along ${components} of ${data.components.length} components; the command qkscope collage draws any.` : "";
}

// `chart(label, height, draw)` makes the drawing.
export function tokenPart(app, head, details, chart) {
  const { data, store } = app;
  const { checkpoint } = store.state;
  const detail = details.rows("sample", "own", checkpoint, head);
  const axes = shownAxes(app);
  const points = collagePoints(detail, axes);
  const documents = documentsOf(detail);
  const document = documents.some(([each]) => each === store.state.tokenDocument) ? store.state.tokenDocument : null;
  const title = "Single tokens, native context length";
  const label = `${title}: ${data.name(head)} along ${axes.map(axisName).join(" and ")}${document === null ? "" : `, document ${whole(document)} over the others`}`;
  const words = points.length ? [axesWords(data, checkpoint, head, axes), farthestWords(points, document)] : [];
  return element(
    "div",
    { "data-chart": "sample" },
    element("h4", {}, title),
    points.length ? element("div", { class: "options" }, ...axisMenus(app, axes), documentMenu(app, documents, document)) : null,
    detail ? chart(label, 280, (g) => drawCollage(g, detail, { axes, document })) : null,
    ...[...words, lackWords(data, detail)].filter(Boolean).map((text) => element("p", { class: "about" }, text)),
  );
}
