// Two checkpoints (or seeds, or models) side by side, and how each head got from one to the other.

import { View } from "./view.js";
import { cameFrom } from "./sure.js";
import { categoryPaint } from "./colours.js";
import { correlation, difference, percent, shorten } from "./format.js";
import { dotRadius, drawDots, drawFrame, portraitFrame } from "./portrait.js";
import { element, named, select } from "./dom.js";
import { significant } from "./numbers.js";

function positions(app, checkpoint) {
  const { data, store } = app;
  const start = data.row(checkpoint, store.state.component);
  const { r_q: q, r_k: k } = data.choices[store.state.choice];
  return { x: q.subarray(start, start + data.nHeads), y: k.subarray(start, start + data.nHeads) };
}

function panels(app, width) {
  const count = app.data.oneRun ? 3 : 2;
  const columns = width >= 760 ? count : 1;
  const w = width / columns;
  const h = Math.min(400, w * 0.95) + 26;
  return Array.from({ length: count }, (_, i) => ({ x: (i % columns) * w, y: Math.floor(i / columns) * h + 26, w, h: h - 26 }));
}

function drawMoves(g, frame) {
  const { app } = g;
  const { data, store } = app;
  const [a, b] = store.state.compare;
  const [to, mask] = [positions(app, b), app.selection.mask(b)];
  const start = data.row(b, store.state.component);
  const { category } = data.choices[store.state.choice];
  for (let h = 0; h < data.nHeads; h += 1) {
    const from = cameFrom(data, store.state, a, b, h);
    if (!mask[h] || ![...from, to.x[h], to.y[h]].every(Number.isFinite)) continue;
    const { fill } = categoryPaint(data, category[start + h], g.theme);
    const end = [frame.x(to.x[h]), frame.y(to.y[h])];
    g.pen.line([[frame.x(from[0]), frame.y(from[1])], end], { stroke: fill, width: 1, alpha: 0.55 });
    g.pen.circle(...end, 2.2, { fill });
  }
}

function draw(g) {
  const { app } = g;
  const { compare } = app.store.state;
  panels(app, g.width).forEach((box, i) => {
    const frame = portraitFrame(app, box);
    const label = (c) => shorten(app.data.checkpoints[c].label, Math.floor(box.w / 14));
    const title = i < 2 ? `${"AB"[i]}: ${label(compare[i])}` : "A to B, every head";
    g.pen.text(title, frame.left, box.y - 4, { size: 13, weight: 650, fill: g.theme.ink });
    drawFrame(g, frame);
    if (i === 2) drawMoves(g, frame);
    else drawDots(g, frame, { ...positions(app, compare[i]), mask: app.selection.mask(compare[i]), checkpoint: compare[i], radius: dotRadius(app.data.nHeads, box.w) * 0.8, errors: true });
  });
}

// Every measure at A, at B, and the difference.
export function comparisonRows(app) {
  const [a, b] = app.store.state.compare.map((c) => app.summaries.at(c));
  const { choice, compare } = app.store.state;
  const means = [["mean r_q", "r_q"], ["mean r_k", "r_k"], ["mean |r_k|", "r_k_abs"], ["mean explained variance", "explained_variance"]].map(([text, key]) => [text, a[key].mean, b[key].mean, "mean", key]);
  const shares = app.data.categories.map((category, i) => [category.name, a.shares[i], b.shares[i], "share", category.name]);
  return [
    ["window", ...compare.map((c) => app.data.window(choice, c)), "count"],
    ["heads", a.heads, b.heads, "count"],
    ...means,
    ["concordant", a.concordant, b.concordant, "share", "concordant"],
    ["discordant", a.discordant, b.discordant, "share", "discordant"],
    ...shares.filter(([, one, other]) => one || other),
  ];
}

// Errors over documents at A and at B; NaN where they are not known, as for a selection of heads.
function errorsOf(app, key) {
  return app.store.state.compare.map((c) => (key ? app.summaries.error(c, key) : NaN));
}

function plusMinus(kind, error) {
  if (!Number.isFinite(error)) return "";
  return kind === "share" ? ` ± ${percent(error, 1)}` : ` ± ${significant(error, 2)}`;
}

function fillTable(app, body) {
  const format = { mean: (v) => correlation(v, 3), share: (v) => percent(v, 1), count: (v) => (Number.isFinite(v) ? v.toLocaleString("en-US") : "not recorded") };
  const delta = { mean: (v) => difference(v, 3), share: (v) => (Number.isFinite(v) ? `${difference(100 * v, 1)} points` : "undefined"), count: (v) => (Number.isFinite(v) ? `${v > 0 ? "+" : ""}${v.toLocaleString("en-US")}` : "") };
  body.replaceChildren(
    ...comparisonRows(app).map(([text, one, other, kind, key]) => {
      const [before, after] = errorsOf(app, key);
      const cells = [format[kind](one) + plusMinus(kind, before), format[kind](other) + plusMinus(kind, after), delta[kind](other - one) + plusMinus(kind, Math.hypot(before, after))];
      return element("tr", {}, element("th", { scope: "row" }, text), ...cells.map((cell) => element("td", {}, cell)));
    }),
  );
}

export function compareView(app) {
  const { store, data } = app;
  if (data.checkpoints.length < 2) return null;
  const choices = data.checkpoints.map((c, i) => [i, shorten(c.label, 40)]);
  const pickers = ["A", "B"].map((letter, i) =>
    select(`${data.Noun} ${letter}`, choices, (value) => store.set({ compare: i ? [store.state.compare[0], Number(value)] : [Number(value), store.state.compare[1]] })),
  );
  const body = element("tbody");
  const heads = ["A", "B"].map(() => element("th", { scope: "col" }));
  const view = new View(app, {
    id: "compare", surface: "canvas", title: `Compare two ${data.noun}s`,
    about: "The same selection, window and component on both sides.",
    options: [element("label", {}, "A ", pickers[0]), element("label", {}, "B ", pickers[1])],
    uses: ["compare", "checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "theme"],
    height: (width) => {
      const last = panels(app, width).at(-1);
      return Math.ceil(last.y + last.h);
    },
    draw,
    table: () => ({ columns: ["measure", "A", "B", "difference", "A_se", "B_se"], rows: comparisonRows(app).map(([text, one, other, , key]) => [text, one, other, other - one, ...errorsOf(app, key)]) }),
    note: () => (data.hasErrors ? "± is one standard error over documents; that of a difference is as if A and B had read different documents, and smaller where they read the same." : ""),
    label: () => `Portraits of ${store.state.compare.map((c) => data.checkpoints[c].label).join(" and ")}; the table below has the numbers.`,
  });
  view.node.append(
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Measures of A and B" }, element("table", { class: "numbers" }, element("caption", { class: "hidden" }, "Measures of A and B"), element("thead", {}, element("tr", {}, element("td"), ...heads, element("th", { scope: "col" }, "B − A"))), body)),
  );
  const update = () => {
    store.state.compare.forEach((c, i) => {
      pickers[i].value = c;
      heads[i].replaceChildren(named(data.checkpoints[c].label));
    });
    fillTable(app, body);
  };
  store.subscribe((changed) => ["compare", "checkpoint", "component", "choice", "layers", "hidden", "brush"].some((key) => changed.has(key)) && update());
  update();
  return view;
}
