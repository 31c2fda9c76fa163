// Two checkpoints side by side and how each head got from one to the other; of seeds or models, several, one panel each.

import { MOST_COMPARED } from "./state.js";
import { View } from "./view.js";
import { attachCells, cellText, cellsHeight, drawCells } from "./cells.js";
import { button, element, named, select } from "./dom.js";
import { cameFrom } from "./sure.js";
import { attachMarkKeys, choose, nearest, point } from "./pointing.js";
import { difference, shorten, whole } from "./format.js";
import { clipped, dotRadius, drawDots, drawFrame, isInside, portraitFrame } from "./portrait.js";
import { headLines } from "./explorer.js";
import { headPaint, signedColour } from "./colours.js";
import { estimate, outcome, shareEstimate } from "./numbers.js";
import { textWidth } from "./pen.js";

const ARROWS = 12; // heads that moved most, with their names

const isPair = (app) => app.data.oneRun && app.store.state.compare.length === 2;

function positions(app, checkpoint) {
  const { data, store } = app;
  const start = data.row(checkpoint, store.state.component);
  const { r_q: q, r_k: k } = data.choices[store.state.choice];
  return { x: q.subarray(start, start + data.nHeads), y: k.subarray(start, start + data.nHeads) };
}

function panels(app, width) {
  const count = app.store.state.compare.length + (isPair(app) ? 1 : 0);
  const columns = width >= 760 ? Math.min(3, count) : width >= 480 ? Math.min(2, count) : 1;
  const w = width / columns;
  const h = Math.min(400, w * 0.95) + 26;
  return Array.from({ length: count }, (_, i) => ({ x: (i % columns) * w, y: Math.floor(i / columns) * h + 26, w, h: h - 26 }));
}

// Heads that both ends have, the one that moved farthest first: [head, from, to].
function moves(app) {
  const { data, store } = app;
  const [a, b] = store.state.compare;
  const [to, mask] = [positions(app, b), app.selection.mask(b)];
  const all = data.layers.map((_, h) => [h, cameFrom(data, store.state, a, b, h), [to.x[h], to.y[h]]]);
  const far = ([, from, end]) => Math.hypot(end[0] - from[0], end[1] - from[1]);
  return all.filter(([h, from, end]) => mask[h] && [...from, ...end].every(Number.isFinite)).sort((one, other) => far(other) - far(one));
}

// A line with a head where it ends inside the frame.
function drawArrow(g, [[x0, y0], [x1, y1]], style, ends) {
  const angle = Math.atan2(y1 - y0, x1 - x0);
  g.pen.line([[x0, y0], [x1, y1]], style);
  if (!ends || Math.hypot(x1 - x0, y1 - y0) < 6) return;
  const side = (turn) => [x1 - 7 * Math.cos(angle + turn), y1 - 7 * Math.sin(angle + turn)];
  g.pen.polygon([[x1, y1], side(0.4), side(-0.4)], { fill: style.stroke, alpha: style.alpha });
}

function drawMoves(g, frame) {
  const { app } = g;
  const { data, store } = app;
  const start = data.row(store.state.compare[1], store.state.component);
  const all = moves(app);
  all.forEach(([h, from, to], rank) => {
    const line = clipped(frame, ...[from, to].map(([q, k]) => [frame.x(q), frame.y(k)]));
    const { fill } = headPaint(data, store.state.choice, start + h, g.theme);
    if (rank >= ARROWS && line) g.pen.line(line, { stroke: fill, width: 0.8, alpha: 0.25 });
  });
  for (const [h, from, to] of all.slice(0, ARROWS).reverse()) {
    const line = clipped(frame, ...[from, to].map(([q, k]) => [frame.x(q), frame.y(k)]));
    const stroke = g.theme.dark ? g.theme.edge : headPaint(data, store.state.choice, start + h, g.theme).fill; // seen on dark paper, too
    if (line) drawArrow(g, line, { stroke, width: 1.6, alpha: 0.9 }, isInside(frame, ...to));
  }
  const labelled = [];
  all.slice(0, ARROWS).forEach(([h, , [q, k]]) => {
    if (labelled.length === 4 || !isInside(frame, q, k) || labelled.some(([x, y]) => Math.abs(x - frame.x(q)) < 40 && Math.abs(y - frame.y(k)) < 12)) return;
    labelled.push([frame.x(q), frame.y(k)]);
    const left = frame.x(q) + textWidth(data.name(h), 10.5) + 6 > frame.right;
    g.pen.text(data.name(h), frame.x(q) + (left ? -5 : 5), frame.y(k) - 4, { size: 10.5, fill: g.theme.ink, anchor: left ? "end" : "start" });
  });
}

function draw(g) {
  const { app } = g;
  const { compare } = app.store.state;
  panels(app, g.width).forEach((box, i) => {
    const frame = portraitFrame(app, box);
    const label = (c) => shorten(app.data.checkpoints[c].label, Math.floor(box.w / 14));
    const title = i < compare.length ? `${"ABCDEF"[i]}: ${label(compare[i])}` : `A to B: the ${ARROWS} largest moves`;
    g.pen.text(title, frame.left, box.y - 4, { size: 13, weight: 650, fill: g.theme.ink });
    drawFrame(g, frame);
    if (i === compare.length) drawMoves(g, frame);
    else drawDots(g, frame, { ...positions(app, compare[i]), mask: app.selection.mask(compare[i]), checkpoint: compare[i], radius: dotRadius(app.data.nHeads, box.w) * 0.8, errors: true });
  });
}

// The panel and the head that a pointer means.
function under(view, event) {
  const { app } = view;
  const { compare } = app.store.state;
  const [x, y] = view.place(event);
  const i = panels(app, view.width).findIndex((box) => x >= box.x && x < box.x + box.w && y >= box.y - 26 && y < box.y + box.h);
  if (i < 0) return [null, null];
  const checkpoint = compare[Math.min(i, compare.length - 1)];
  const frame = portraitFrame(app, panels(app, view.width)[i]);
  const at = positions(app, checkpoint);
  return [checkpoint, nearest((h) => [frame.x(at.x[h]), frame.y(at.y[h])], app.selection.mask(checkpoint), [x, y])];
}

function attach(view) {
  const { app, surface } = view;
  surface.addEventListener("pointermove", (event) => {
    const [checkpoint, head] = under(view, event);
    point(view, head, event, (_, h) => [app.data.checkpoints[checkpoint].label, ...headLines(app, h, checkpoint)]);
  });
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
  surface.addEventListener("click", (event) => choose(view, under(view, event)[1]));
  // With keys: the heads of the last panel with marks, told at both ends.
  const placesOf = () => {
    const last = app.store.state.compare.length - 1;
    const [frame, at] = [portraitFrame(app, panels(app, view.width)[last]), positions(app, app.store.state.compare[last])];
    return (h) => [frame.x(at.x[h]), frame.y(at.y[h])];
  };
  const told = (_, h) => app.store.state.compare.flatMap((c) => [app.data.checkpoints[c].label, ...headLines(app, h, c).slice(0, 4)]);
  attachMarkKeys(view, "scatter plots", placesOf, told);
}

// Every measure at each compared entry: [text, kind, values, key of its errors].
export function comparisonRows(app) {
  const { choice, compare } = app.store.state;
  const all = compare.map((c) => app.summaries.at(c));
  const means = [["mean r_q", "r_q"], ["mean r_k", "r_k"], ["mean |r_k|", "r_k_abs"], ["mean explained variance", "explained_variance"]].map(([text, key]) => [text, "mean", all.map((s) => s[key].mean), key]);
  const shares = app.data.categories.map((category, i) => [app.data.categoryName(i, app.store.state.component), "share", all.map((s) => s.shares[i]), category.name]);
  return [
    ["window", "count", compare.map((c) => app.data.window(choice, c))],
    ["heads", "count", all.map((s) => s.heads)],
    ...means,
    ["concordant", "share", all.map((s) => s.concordant), "concordant"],
    ["discordant", "share", all.map((s) => s.discordant), "discordant"],
    ...shares.filter(([, , values]) => values.some(Boolean)),
  ];
}

// Errors over documents; NaN where they are not known, as for a selection of heads.
function errorsOf(app, key) {
  return app.store.state.compare.map((c) => (key ? app.summaries.error(c, key) : NaN));
}

// Of the last minus the first: { error, paired }.
function differenceOf(app, key) {
  const { compare } = app.store.state;
  return key ? app.summaries.differenceError(compare[0], compare.at(-1), key) : { error: NaN, paired: false };
}

const points = (value, error) => `${difference(100 * value, 1)}${Number.isFinite(error) ? ` ± ${(100 * error).toFixed(1)}` : ""} points`;
const FORMAT = { mean: (v, error) => estimate(v, error, 3), share: (v, error) => shareEstimate(v, error), count: (v) => (Number.isFinite(v) ? whole(v) : "not recorded") };
const DELTA = { mean: (v, error) => estimate(v, error, 3, { sign: true }), share: (v, error) => (Number.isFinite(v) ? points(v, error) : "undefined"), count: (v) => (Number.isFinite(v) ? `${v > 0 ? "+" : ""}${whole(v).replace("-", "−")}` : "") };

function deltaText(app, kind, values, key) {
  const { error, paired } = differenceOf(app, key);
  return `${DELTA[kind](values.at(-1) - values[0], error)}${Number.isFinite(error) && !paired ? " (unpaired)" : ""}`;
}

// What the errors of the table are.
function errorWords(app) {
  if (!app.data.hasErrors) return "";
  const words = "± is one standard error over documents.";
  const { error, paired } = differenceOf(app, "r_q");
  if (!Number.isFinite(error) || app.store.state.compare.length !== 2) return words;
  return `${words} B − A is ${paired ? "paired: both read the same documents." : "unpaired: the errors of A and B are combined as if their documents differed."}`;
}

function fillTable(app, head, body) {
  const { data, store } = app;
  const pair = store.state.compare.length === 2;
  const names = store.state.compare.map((c) => element("th", { scope: "col" }, named(data.checkpoints[c].label)));
  head.replaceChildren(element("td"), ...names, ...(pair ? [element("th", { scope: "col" }, "B − A")] : []));
  body.replaceChildren(
    ...comparisonRows(app).map(([text, kind, values, key]) => {
      const errors = errorsOf(app, key);
      const cells = values.map((value, i) => FORMAT[kind](value, errors[i]));
      if (pair) cells.push(deltaText(app, kind, values, key));
      return element("tr", {}, element("th", { scope: "row" }, text), ...cells.map((cell) => element("td", {}, cell)));
    }),
  );
}

function pickers(app) {
  const { data, store } = app;
  const choices = data.checkpoints.map((c, i) => [i, shorten(c.label, 40)]);
  const node = element("div", { class: "options" });
  const set = (i, value) => store.set({ compare: store.state.compare.map((c, place) => (place === i ? value : c)) });
  const update = () => {
    const { compare } = store.state;
    const focused = node.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const fields = compare.map((c, i) => {
      const field = select(`${data.Noun} ${"ABCDEF"[i]}`, choices, (value) => set(i, Number(value)));
      field.value = c;
      return element("label", {}, `${"ABCDEF"[i]} `, field);
    });
    const more = compare.length < Math.min(MOST_COMPARED, data.checkpoints.length) ? button(`Add a ${data.noun}`, () => store.set({ compare: [...compare, data.checkpoints.findIndex((_, c) => !compare.includes(c))] }), { class: "tool", "aria-label": `Add a ${data.noun}` }) : null;
    const fewer = compare.length > 2 ? button("Remove the last", () => store.set({ compare: compare.slice(0, -1) }), { class: "tool", "aria-label": "Remove the last" }) : null;
    node.replaceChildren(...[...fields, more, fewer].filter(Boolean));
    if (focused) node.querySelector(`[aria-label="${focused}"]`)?.focus();
  };
  store.subscribe((changed) => changed.has("compare") && update());
  update();
  return node;
}

export function compareView(app) {
  const { store, data } = app;
  if (data.checkpoints.length < 2) return null;
  const [head, body] = [element("tr"), element("tbody")];
  const what = data.oneRun ? "two" : "the";
  const view = new View(app, {
    id: "compare", surface: "canvas", categories: () => true, title: `Compare ${what} ${data.noun}s`,
    about: "Same selection, context length, component, and axes.",
    options: [pickers(app)],
    uses: ["compare", "checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "theme"],
    height: (width) => {
      const last = panels(app, width).at(-1);
      return Math.ceil(last.y + last.h);
    },
    draw,
    attach,
    table: () => {
      const names = store.state.compare.map((_, i) => "ABCDEF"[i]);
      const rows = comparisonRows(app).map(([text, , values, key]) => {
        const { error, paired } = differenceOf(app, key);
        return [text, ...values, values.at(-1) - values[0], ...errorsOf(app, key), error, Number.isFinite(error) ? Number(paired) : NaN];
      });
      return { columns: ["measure", ...names, "difference", ...names.map((name) => `${name}_se`), "difference_se", "paired"], rows };
    },
    label: () => `Portraits of ${store.state.compare.map((c) => data.checkpoints[c].label).join(" and ")}; the table “Measures” has the numbers.`,
  });
  const words = element("p", { class: "note" });
  const table = element("table", { class: "numbers compared" }, element("caption", { class: "hidden" }, "Measures of what is compared"), element("thead", {}, head), body);
  view.measures = element("div", { class: "view", id: "measures" }, element("h3", {}, "Measures"), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Measures of what is compared" }, table), words);
  const update = () => {
    fillTable(app, head, body);
    words.textContent = errorWords(app);
  };
  store.subscribe((changed) => ["compare", "checkpoint", "component", "choice", "layers", "hidden", "brush"].some((key) => changed.has(key)) && update());
  update();
  return view;
}

// Where heads changed: B − A of r_k, or of r_q where the map above shows r_q.
export function differenceMap(app) {
  const { data, store } = app;
  if (!data.oneRun || data.checkpoints.length < 2) return null;
  const name = () => (store.state.measure === "r_q" ? "r_q" : "r_k");
  const pair = () => [store.state.compare[0], store.state.compare.at(-1)];
  // As tables/head_changes.parquet: where the sign of a head is not known, a flip is no change.
  const value = (h) => {
    const [a, b] = pair();
    const from = cameFrom(data, store.state, a, b, h)[name() === "r_q" ? 0 : 1];
    return data.choices[store.state.choice][name()][data.at(b, store.state.component, h)] - from;
  };
  const errorOf = (h) => {
    const paired = data.changeError(name(), store.state, ...pair(), h);
    return Number.isFinite(paired) ? [paired, true] : [Math.hypot(...pair().map((c) => data.error(name(), store.state, c, h))), false];
  };
  const ends = () => pair().map((c) => data.checkpoints[c].label).join(" → ");
  const lines = (_, h) => {
    const [error, paired] = errorOf(h);
    const critical = Math.max(...pair().map((c) => data.about.critical[c]));
    const sure = { changed: "", unchanged: "not significant", unknown: "error not known" }[outcome(value(h), error, critical)];
    return [`Layer ${data.layers[h]}, head ${data.heads[h]}`, ends(), `${name()} ${estimate(value(h), error, 3, { sign: true })}${Number.isFinite(error) && !paired ? " (unpaired)" : ""}`, ...(sure ? [sure] : [])];
  };
  return new View(app, {
    id: "difference", surface: "canvas", title: "Where heads changed", card: null, uses: ["compare", "checkpoint", "component", "choice", "measure", "layers", "hidden", "brush", "head", "hover", "theme"],
    about: "B − A of every head; darkest at ± 1 or more.",
    height: () => cellsHeight(app),
    draw: (g) => drawCells(g, (h, place) => (Number.isFinite(value(h)) ? { fill: signedColour(data.about, value(h)), text: cellText(difference(value(h)), place) } : { fill: null, text: "?" })),
    table: () => ({ columns: ["layer", "head", `${name()}_difference`, `${name()}_difference_se`, "paired"], rows: data.layers.map((layer, h) => [layer, data.heads[h], value(h), errorOf(h)[0], Number(errorOf(h)[1])]) }),
    attach: (view) => attachCells(view, lines),
    label: () => `${name()} of every head, ${ends()}. Arrow keys move, Enter selects.`,
    note: () => `${name()}, ${ends()}. Green: increase; brown: decrease.${Number.isFinite(data.changeError(name(), store.state, ...pair(), 0)) ? " Standard errors are paired." : data.hasErrors ? " Standard errors are unpaired: single heads have paired ones from each checkpoint to the next and from first to last, on PC0." : ""}`,
  });
}
