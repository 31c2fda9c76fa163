// One head: what it is now, its path over training, all its components, its layer neighbours, a link to it.

import { button, element, named, svgElement } from "./dom.js";
import { categoryPaint, markOf } from "./colours.js";
import { copyText } from "./cards.js";
import { correlation, shorten, whole } from "./format.js";
import { LABEL, drawErrors, scale, valueAxis } from "./axis.js";
import { SvgPen } from "./pen.js";
import { cameFrom, estimates, sureness } from "./sure.js";
import { toHash } from "./state.js";

// Pairs of a term and its text, with what the term means where that is not plain.
function definition(entries) {
  return element("dl", { class: "facts-small" }, ...entries.flatMap(([term, text, title]) => [element("dt", { title }, term), element("dd", { title }, text)]));
}

function chart(app, label, width, height, draw) {
  const node = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "small-chart" });
  draw({ pen: new SvgPen(node), width, height, theme: app.theme(), app });
  return node;
}

// r_q and r_k over the checkpoints, and below them a strip with the category of each.
function drawPath(g, head) {
  const { data, store, selection } = g.app;
  const { component, choice, checkpoint } = store.state;
  const list = selection.checkpoints();
  const source = data.choices[choice];
  const frame = { left: 34, right: g.width - 6, top: 10, bottom: g.height - 40 };
  const y = scale([-1, 1], [frame.bottom, frame.top]);
  const step = (frame.right - frame.left) / list.length;
  const x = (i) => frame.left + (i + 0.5) * step;
  const now = list.indexOf(checkpoint);
  if (now >= 0) g.pen.rect(frame.left + now * step, frame.top, step, frame.bottom - frame.top + 12, { fill: g.theme.faint, alpha: 0.6 });
  valueAxis(g, frame, y, [-1, -0.5, 0, 0.5, 1], (v) => correlation(v, 1));
  for (const [name, colour, mark] of [["r_q", data.about.colours.blue, "circle"], ["r_k", data.about.colours.red, "square"]]) {
    const values = source[name];
    const points = list.map((c, i) => [x(i), y(values[data.at(c, component, head)])]).filter(([, at]) => Number.isFinite(at));
    if (points.length > 1) g.pen.line(points, { stroke: colour, width: 2 });
    for (const point of points) g.pen.mark(mark, ...point, list.length > 40 ? 1.5 : 3.4, { fill: colour, stroke: g.theme.paper, width: 0.7 });
    drawErrors(g, x, y, list.map((c) => values[data.at(c, component, head)]), list.map((c) => data.error(name, store.state, c, head)), [-1, 1]);
  }
  list.forEach((c, i) => {
    const code = source.category[data.at(c, component, head)];
    if (code !== data.absent) g.pen.rect(frame.left + i * step + 0.5, frame.bottom + 5, Math.max(1, step - 1), 7, categoryPaint(data, code, g.theme));
  });
  const ends = { size: LABEL, fill: g.theme.muted };
  g.pen.text(shorten(data.checkpoints[list[0]].label, 16), frame.left, frame.bottom + 27, ends);
  g.pen.text(shorten(data.checkpoints[list[list.length - 1]].label, 16), frame.right, frame.bottom + 27, { ...ends, anchor: "end" });
}

// All components at this checkpoint: r_q and r_k as marks, explained variance as a bar below.
function drawComponents(g, head) {
  const { data, store } = g.app;
  const { checkpoint, choice, component } = store.state;
  const source = data.choices[choice];
  const frame = { left: 34, right: g.width - 6, top: 10, bottom: g.height - 62 };
  const y = scale([-1, 1], [frame.bottom, frame.top]);
  const step = (frame.right - frame.left) / data.components.length;
  valueAxis(g, frame, y, [-1, -0.5, 0, 0.5, 1], (v) => correlation(v, 1));
  data.components.forEach((pc, p) => {
    const at = data.at(checkpoint, p, head);
    const middle = frame.left + (p + 0.5) * step;
    if (p === component) g.pen.rect(middle - step / 2, frame.top, step, g.height - frame.top, { fill: g.theme.faint, alpha: 0.6 });
    for (const [value, colour, mark, aside] of [[source.r_q[at], data.about.colours.blue, "circle", -4], [source.r_k[at], data.about.colours.red, "square", 4]]) {
      if (!Number.isFinite(value)) continue;
      g.pen.line([[middle + aside, y(0)], [middle + aside, y(value)]], { stroke: colour, width: 2 });
      g.pen.mark(mark, middle + aside, y(value), 3.2, { fill: colour });
    }
    const tall = 22 * (source.explained_variance[at] || 0);
    g.pen.rect(middle - Math.min(8, step * 0.35), g.height - 18 - tall, Math.min(16, step * 0.7), tall, { fill: data.about.colours.purple, alpha: 0.7 });
    g.pen.text(`PC${pc}`, middle, g.height - 4, { size: 10, anchor: "middle", fill: g.theme.muted });
  });
  g.pen.text("EV", frame.left - 8, g.height - 20, { size: 10, anchor: "end", fill: g.theme.muted });
}

function neighbours(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  const source = data.choices[choice];
  const same = data.layers.map((_, h) => h).filter((h) => data.layers[h] === data.layers[head]);
  const items = same.map((h) => {
    const at = data.at(checkpoint, component, h);
    const code = source.category[at];
    const name = data.categories[code]?.name ?? "not measured";
    const swatch = swatchOf(app, code, data.kind("layer_kind", checkpoint, h));
    const label = `${data.name(h)}, ${name}, r_q ${correlation(source.r_q[at])}, r_k ${correlation(source.r_k[at])}`;
    return button(swatch, () => store.set({ head: h }), { class: "neighbour", title: label, "aria-pressed": String(h === head) });
  });
  items.forEach((item, i) => item.append(data.name(same[i])));
  return element("div", { class: "neighbours", role: "group", "aria-label": `Heads of layer ${data.layers[head]}` }, ...items);
}

// A small mark in the colour and shape of a head.
export function swatchOf(app, code, kind = "rotary") {
  const node = svgElement("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true", class: "swatch" });
  const paint = categoryPaint(app.data, code, app.theme());
  new SvgPen(node).mark(markOf(kind), 6, 6.4, 4.6, paint);
  return node;
}

// The mark of r_q or r_k in running text.
function sign(app, colour, mark) {
  const node = svgElement("svg", { width: 10, height: 10, viewBox: "0 0 10 10", "aria-hidden": "true" });
  new SvgPen(node).mark(mark, 5, 5, 4, { fill: app.data.about.colours[colour] });
  return node;
}

function about(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  const at = data.at(checkpoint, component, head);
  const source = data.choices[choice];
  const kind = [data.kind("rotary", checkpoint, head), data.kind("attention", checkpoint, head)];
  const reach = data.number("attention_window", checkpoint, head);
  return definition([
    ["category", data.categories[source.category[at]]?.name ?? "not measured here"],
    ...(data.hasErrors ? [["how sure", sureness(data, store.state, checkpoint, head)]] : []),
    ...estimates(data, store.state, checkpoint, head).map(([name, text]) => [name, text, data.hasErrors ? "value ± 1 standard error over documents" : ""]),
    ["n", `${whole(source.n_q[at])} queries, ${whole(source.n_k[at])} keys`],
    ["window", Number.isFinite(source.window[at]) ? `${whole(source.window[at])} tokens` : "not recorded"],
    ["layer", `${kind[0] || "unknown"}${kind[1] ? `, ${kind[1]} attention` : ""}${Number.isFinite(reach) ? ` over ${whole(reach)} tokens` : ""}`],
    ["key head", Number.isFinite(data.number("kv_head", checkpoint, head)) ? whole(data.number("kv_head", checkpoint, head)) : "not recorded"],
  ]);
}

// What every lens says about this head.
function lensFacts(app, head) {
  const { data, store } = app;
  const parts = data.lenses.map((lens) => {
    const entries = lens.listed.map((column) => [column.name, column.text(store.state, store.state.checkpoint, head), column.definition]);
    return element("div", {}, element("h4", {}, lens.title), definition(entries));
  });
  return parts.length ? element("div", { class: "lens-facts" }, ...parts) : null;
}

function title(app, head) {
  const { data, store } = app;
  const link = element("a", { href: toHash(data, store.state), class: "permalink" }, "link to this head");
  const copy = button("Copy link", () => copyText(app, window.location.href.replace(/#.*$/, "") + toHash(data, store.state), "Link copied"), { class: "tool" });
  const step = (by) => store.set({ head: (head + by + data.nHeads) % data.nHeads });
  return element(
    "div", { class: "view-head" },
    element("h3", { id: "title-head" }, `Head ${data.name(head)} at `, named(data.checkpoints[store.state.checkpoint].label)),
    element("div", { class: "tools" }, link, copy, button("‹", () => step(-1), { class: "tool", "aria-label": "Previous head" }), button("›", () => step(1), { class: "tool", "aria-label": "Next head" }), button("Close", () => store.set({ head: null }), { class: "tool" })),
  );
}

// Where to start when nothing is chosen: the heads that moved most on the way to this checkpoint.
function movers(app) {
  const { data, store, selection } = app;
  const { checkpoint, component, choice } = store.state;
  const before = selection.checkpoints().filter((c) => c < checkpoint).at(-1);
  const [one, other] = before === undefined || !data.oneRun ? [null, checkpoint] : [before, checkpoint];
  const source = data.choices[choice];
  const mask = selection.mask(checkpoint);
  const far = (h) => {
    const b = data.at(other, component, h);
    if (one === null) return source.r_q[b];
    const [q, k] = cameFrom(data, store.state, one, other, h);
    return Math.hypot(source.r_q[b] - q, source.r_k[b] - k);
  };
  const ranked = data.layers.map((_, h) => [h, far(h)]).filter(([h, d]) => mask[h] && Number.isFinite(d)).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const lead = one === null ? "The strongest queries here: " : ["Moved most since ", named(data.checkpoints[one].label), ": "];
  const list = ranked.map(([h]) => button(data.name(h), () => store.set({ head: h }), { class: "chip" }));
  return element("p", { class: "movers" }, element("span", {}, ...[lead].flat()), ...(list.length ? list : ["no head is selected by the filters."]));
}

export function headPanel(app) {
  const { store } = app;
  const node = element("section", { class: "view head-panel", id: "head", "aria-labelledby": "title-head" });
  const draw = () => {
    const { head } = store.state;
    node.classList.toggle("empty", head === null);
    if (head === null) {
      node.replaceChildren(element("h3", { id: "title-head" }, "No head chosen"), element("p", { class: "about" }, `Click a head in the portrait or the map, or search for one (L12H3). Its ${app.data.oneRun ? "path, " : ""}components and neighbours appear here.`), movers(app));
      return;
    }
    const name = app.data.name(head);
    node.replaceChildren(
      title(app, head),
      element(
        "div", { class: "head-grid" },
        about(app, head),
        app.data.oneRun ? element("div", {}, element("h4", {}, "Over training: ", element("span", { class: "is-q" }, sign(app, "blue", "circle"), " r_q"), " ", element("span", { class: "is-k" }, sign(app, "red", "square"), " r_k")), chart(app, `Path of ${name} over training`, 380, 210, (g) => drawPath(g, head))) : null,
        element("div", {}, element("h4", {}, `All ${app.data.components.length} components here`), chart(app, `Components of ${name}`, 380, 210, (g) => drawComponents(g, head))),
      ),
      ...[lensFacts(app, head)].filter(Boolean),
      element("h4", {}, `Layer ${app.data.layers[head]}`),
      neighbours(app, head),
    );
  };
  const uses = ["head", "checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];
  store.subscribe((changed) => uses.some((key) => changed.has(key)) && draw());
  draw();
  return { node };
}
