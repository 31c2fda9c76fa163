// The layer x head map of a checkpoint: every head in its place, coloured by r_q, r_k or category.

import { View } from "./view.js";
import { categoryPaint, correlationColour, isNegative, markOf, markWords, readableOn } from "./colours.js";
import { correlation } from "./format.js";
import { headLines } from "./explorer.js";
import { segmented } from "./dom.js";

const MARGIN = { left: 34, right: 24, top: 22, bottom: 6 };
const LETTERS = ["P", "Q", "K", "C", "M", "?"]; // beside colour, for readers who see it differently

function geometry(app, width) {
  const { nLayers, nColumns } = app.data;
  const across = (width - MARGIN.left - MARGIN.right) / nColumns;
  const down = Math.max(5, Math.min(60, 540 / nLayers));
  return { across, down, x: (head) => MARGIN.left + head * across, y: (layer) => MARGIN.top + layer * down };
}

function everyNth(count, room, wanted) {
  return Math.max(1, Math.ceil(wanted / (room || 1)), Math.ceil(count / 64));
}

function drawCell(g, place, h, checkpoint) {
  const { pen, theme, app } = g;
  const { data, store, selection } = app;
  const { measure, component, reading } = store.state;
  const source = data.readings[reading];
  const at = data.at(checkpoint, component, h);
  if (source.category[at] === data.absent) return;
  const [x, y] = [place.x(data.heads[h]), place.y(data.layers[h])];
  const gap = place.across > 8 ? 1 : 0.25;
  const box = [x + gap / 2, y + gap / 2, place.across - gap, place.down - gap];
  const alpha = selection.mask(checkpoint)[h] ? 1 : 0.13;
  const value = source[measure]?.[at];
  const byCategory = measure === "category";
  const missing = byCategory ? value === data.undefinedCode : !Number.isFinite(value);
  const fill = missing ? theme.paper : byCategory ? categoryPaint(data, value, theme).fill : correlationColour(data.about, measure, value);
  pen.rect(...box, missing ? { fill, stroke: theme.line, width: 0.7, alpha } : { fill, alpha });
  const text = missing ? "?" : byCategory ? LETTERS[value] : isNegative(value) ? "−" : "";
  if (text && place.down >= 11 && place.across >= 9) {
    const size = Math.min(11, place.down * 0.62);
    pen.text(text, x + place.across / 2, y + place.down / 2 + size * 0.36, { size, anchor: "middle", fill: missing ? theme.muted : readableOn(fill), alpha: alpha * 0.75 });
  }
}

function drawSides(g, place, checkpoint) {
  const { pen, theme, app } = g;
  const { data } = app;
  const rows = everyNth(data.nLayers, place.down, 13);
  const columns = everyNth(data.nColumns, place.across, 17);
  const label = { size: 10.5, fill: theme.muted };
  for (let layer = 0; layer < data.nLayers; layer += 1) {
    const middle = place.y(layer) + place.down / 2;
    if (layer % rows === 0) pen.text(String(layer), MARGIN.left - 6, middle + 4, { ...label, anchor: "end" });
    const h = data.layers.findIndex((each, i) => each === layer && data.readings.own.category[data.at(checkpoint, 0, i)] !== data.absent);
    const side = MARGIN.left + data.nColumns * place.across + 12;
    if (h >= 0) pen.mark(markOf(data.kind("layer_kind", checkpoint, h)), side, middle, Math.min(3.6, place.down * 0.36), { fill: "none", stroke: theme.line, width: 1 });
    else if (place.down >= 11 && layer < (data.checkpoints[checkpoint].n_layers ?? data.nLayers)) {
      const without = data.checkpoints[checkpoint].withoutAttention.includes(layer);
      pen.text(without ? "no attention" : "not measured", MARGIN.left + 6, middle + 4, { ...label, size: 10 });
    }
  }
  for (let head = 0; head < data.nColumns; head += columns) {
    pen.text(String(head), place.x(head) + place.across / 2, MARGIN.top - 6, { ...label, anchor: "middle" });
  }
  pen.text("layer", 2, MARGIN.top - 6, label);
}

function draw(g) {
  const { app } = g;
  const { checkpoint, head, hover } = app.store.state;
  const { data } = app;
  const place = geometry(app, g.width);
  drawSides(g, place, checkpoint);
  for (let h = 0; h < data.nHeads; h += 1) drawCell(g, place, h, checkpoint);
  for (const [h, width] of [[hover, 1.5], [head, 2.4]]) {
    if (h !== null) g.pen.rect(place.x(data.heads[h]), place.y(data.layers[h]), place.across, place.down, { stroke: g.theme.ink, width });
  }
  const box = app.draggingCells ?? (app.store.state.brush?.kind === "cells" ? app.store.state.brush : null);
  if (box) {
    const [x, y] = [place.x(box.heads[0]), place.y(box.layers[0])];
    g.pen.rect(x, y, place.x(box.heads[1] + 1) - x, place.y(box.layers[1] + 1) - y, { stroke: g.theme.ink, width: 1.2, dash: [4, 3] });
  }
}

function cellAt(view, event) {
  const place = geometry(view.app, view.width);
  const [x, y] = view.place(event);
  const [head, layer] = [Math.floor((x - MARGIN.left) / place.across), Math.floor((y - MARGIN.top) / place.down)];
  const { nColumns, nLayers } = view.app.data;
  return head >= 0 && layer >= 0 && head < nColumns && layer < nLayers ? { head, layer } : null;
}

function attachPointer(view) {
  const { app, surface } = view;
  const headAt = (cell) => (cell ? (app.data.byName.get(`L${cell.layer}H${cell.head}`) ?? null) : null);
  let start = null;
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") start = cellAt(view, event);
  });
  surface.addEventListener("pointermove", (event) => {
    const cell = cellAt(view, event);
    if (start && cell && (cell.head !== start.head || cell.layer !== start.layer || app.draggingCells)) {
      surface.setPointerCapture(event.pointerId);
      const sorted = (a, b) => [Math.min(a, b), Math.max(a, b)];
      app.draggingCells = { layers: sorted(start.layer, cell.layer), heads: sorted(start.head, cell.head) };
      app.tooltip.hide();
      view.refresh();
      return;
    }
    const hover = headAt(cell);
    surface.classList.toggle("clickable", hover !== null);
    app.store.set({ hover });
    if (hover === null) app.tooltip.hide();
    else app.tooltip.show(headLines(app, hover, app.store.state.checkpoint), event.clientX, event.clientY);
  });
  surface.addEventListener("pointerup", (event) => {
    if (app.draggingCells) {
      app.store.set({ brush: { kind: "cells", ...app.draggingCells } });
      app.draggingCells = null;
    } else if (event.button === 0) app.store.set({ head: headAt(cellAt(view, event)) });
    start = null;
  });
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function attachKeys(view) {
  const { app, surface } = view;
  surface.tabIndex = 0;
  surface.setAttribute("role", "application");
  surface.setAttribute("aria-roledescription", "map of layers and heads");
  surface.addEventListener("keydown", (event) => {
    const { data, store } = app;
    const current = store.state.hover ?? store.state.head ?? 0;
    const step = STEPS[event.key];
    if (step) {
      let [layer, column] = [data.layers[current], data.heads[current]];
      let found;
      do {
        layer += step[0];
        column += step[1];
        found = data.byName.get(`L${layer}H${column}`);
      } while (found === undefined && layer >= 0 && column >= 0 && layer < data.nLayers && column < data.nColumns);
      if (found !== undefined) {
        store.set({ hover: found });
        app.announce(headLines(app, found, store.state.checkpoint).join(", "));
      }
    } else if (event.key === "Enter" || event.key === " ") store.set({ head: current });
    else if (event.key === "Escape") store.set({ head: null, hover: null, brush: null });
    else return;
    event.preventDefault();
  });
  surface.addEventListener("blur", () => app.store.set({ hover: null }));
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
    uses: ["checkpoint", "component", "reading", "layers", "hidden", "brush", "head", "hover", "measure", "theme"],
    card: null,
    options: [control.node],
    height: () => Math.ceil(MARGIN.top + MARGIN.bottom + geometry(app, 400).down * data.nLayers),
    draw,
    table: () => app.headTable(store.state.checkpoint, true),
    attach: (view) => {
      attachPointer(view);
      attachKeys(view);
    },
    label: () => `Map of ${data.nLayers} layers by ${data.nColumns} heads at ${data.checkpoints[store.state.checkpoint].label}, coloured by ${store.state.measure}. Arrow keys move, Enter selects.`,
    note: () =>
      store.state.measure === "category"
        ? `${letters}. ${markWords(app.layerKinds)}`
        : `From ${correlation(0, 0)} (pale) to 1 (dark); below 0 in the other hue, with a minus sign.`,
  });
}
