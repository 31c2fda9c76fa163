// Layers downwards, heads across: every head in its place, what stands around, and how a reader means a head or a block.

import { attachKeys, choose, point } from "./pointing.js";
import { fitted } from "./numbers.js";
import { markOf, readableOn } from "./colours.js";
import { textWidth } from "./pen.js";

const MARGIN = { left: 34, right: 24, top: 22, bottom: 6 };
const BRACKET = 4; // pixels below the column numbers: heads that share keys

function geometry(app, width) {
  const { nLayers, nColumns } = app.data;
  const across = (width - MARGIN.left - MARGIN.right) / nColumns;
  const down = Math.max(5, Math.min(60, 540 / nLayers));
  return { across, down, x: (head) => MARGIN.left + head * across, y: (layer) => MARGIN.top + layer * down };
}

// A number as a cell shows it: without its leading 0 where that is too wide, and not at all where only a sign would fit.
export function cellText(number, place) {
  const size = textSize(place);
  return fitted(number, place.across - 3, (text) => textWidth(text, size));
}

function textSize(place) {
  return Math.min(11, place.down * 0.62);
}

export function cellsHeight(app) {
  return Math.ceil(MARGIN.top + MARGIN.bottom + geometry(app, 400).down * app.data.nLayers);
}

function everyNth(count, room, wanted) {
  return Math.max(1, Math.ceil(wanted / (room || 1)), Math.ceil(count / 64));
}

function isThere(data, state, head) {
  return data.choices[state.choice].category[data.at(state.checkpoint, state.component, head)] !== data.absent;
}

function drawCell(g, place, h, { fill, text }) {
  const { pen, theme, app } = g;
  const { data, store, selection } = app;
  const [x, y] = [place.x(data.heads[h]), place.y(data.layers[h])];
  const gap = place.across > 8 ? 1 : 0.25;
  const box = [x + gap / 2, y + gap / 2, place.across - gap, place.down - gap];
  const alpha = selection.mask(store.state.checkpoint)[h] ? 1 : 0.13;
  pen.rect(...box, fill ? { fill, alpha } : { fill: theme.paper, stroke: theme.line, width: 0.7, alpha });
  if (text && place.down >= 11 && place.across >= 9) {
    const size = textSize(place);
    pen.text(text, x + place.across / 2, y + place.down / 2 + size * 0.36, { size, anchor: "middle", fill: fill ? readableOn(fill) : theme.muted, alpha: alpha * 0.75 });
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
    const h = data.layers.findIndex((each, i) => each === layer && data.choices.own.category[data.at(checkpoint, 0, i)] !== data.absent);
    const side = MARGIN.left + data.nColumns * place.across + 12;
    if (h >= 0 && /^NoPE/.test(data.kind("layer_kind", checkpoint, h))) pen.rect(0, place.y(layer), MARGIN.left - 2, place.down, { fill: theme.faint });
    if (layer % rows === 0) pen.text(String(layer), MARGIN.left - 6, middle + 4, { ...label, anchor: "end" });
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
  drawKeyGroups(g, place, checkpoint);
}

// Heads that share keys, as brackets above the first layer that has them; a head of its own keys has none.
function drawKeyGroups(g, place, checkpoint) {
  const { data } = g.app;
  const first = data.layers[0];
  const groups = new Map();
  data.layers.forEach((layer, h) => {
    const key = data.number("kv_head", checkpoint, h);
    if (layer === first && Number.isFinite(key)) groups.set(key, [...(groups.get(key) ?? []), data.heads[h]]);
  });
  for (const heads of groups.values()) {
    if (heads.length < 2 || heads.length === data.nColumns) continue;
    const [left, right] = [place.x(Math.min(...heads)) + 1.5, place.x(Math.max(...heads) + 1) - 1.5];
    g.pen.line([[left, MARGIN.top - 1], [left, MARGIN.top - BRACKET], [right, MARGIN.top - BRACKET], [right, MARGIN.top - 1]], { stroke: g.theme.line, width: 1 });
  }
}

// The whole map. `paint(h, place)` says how a head's cell looks: fill (null where its value is undefined) and text.
export function drawCells(g, paint) {
  const { app } = g;
  const { data, store } = app;
  const { checkpoint, head, hover } = store.state;
  const place = geometry(app, g.width);
  drawSides(g, place, checkpoint);
  for (let h = 0; h < data.nHeads; h += 1) {
    if (isThere(data, store.state, h)) drawCell(g, place, h, paint(h, place));
  }
  for (const [h, width] of [[hover, 1.5], [head, 2.4]]) {
    if (h !== null) g.pen.rect(place.x(data.heads[h]), place.y(data.layers[h]), place.across, place.down, { stroke: g.theme.ink, width });
  }
  const box = app.draggingCells ?? (store.state.brush?.kind === "cells" ? store.state.brush : null);
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

function attachPointer(view, lines) {
  const { app, surface } = view;
  const headAt = (cell) => (cell ? (app.data.byName.get(`L${cell.layer}H${cell.head}`) ?? null) : null);
  let start = null;
  let dragged = false; // the click that follows a drag chooses nothing
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && (event.pointerType !== "touch" || view.boxing)) start = cellAt(view, event);
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
    point(view, headAt(cell), event, lines);
  });
  surface.addEventListener("pointerup", () => {
    dragged = Boolean(app.draggingCells);
    if (dragged) {
      app.store.set({ brush: { kind: "cells", ...app.draggingCells } });
      app.draggingCells = null;
      view.stopBoxing?.();
    }
    start = null;
  });
  surface.addEventListener("click", (event) => dragged || choose(view, headAt(cellAt(view, event))));
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
}

// The head in a direction, over places where there is none; the same head at an edge.
function nextCell(data, from, [across, down]) {
  let [layer, column] = [data.layers[from], data.heads[from]];
  do {
    layer += down;
    column += across;
    const found = data.byName.get(`L${layer}H${column}`);
    if (found !== undefined) return found;
  } while (layer >= 0 && column >= 0 && layer < data.nLayers && column < data.nColumns);
  return from;
}

// Hover, click, drag a block, arrow keys; `lines(app, head, checkpoint)` is what a reader learns about a head.
export function attachCells(view, lines) {
  attachPointer(view, lines);
  attachKeys(view, { what: "map of layers and heads", first: () => 0, next: (from, direction) => nextCell(view.app.data, from, direction), lines });
}
