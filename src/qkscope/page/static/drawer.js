// The head drawer, from any view, search or link: words, profile, score map, path with errors, components, every metric
// with its rank, raw numbers. It stays open until it is closed; focus stays where the reader left it.

import { drawWindows, shownWindows, stackedHeight } from "./both_windows.js";
import { button, element, named, svgElement } from "./dom.js";
import { headPaint, partColours } from "./colours.js";
import { copyText } from "./cards.js";
import { correlation, shorten, whole } from "./format.js";
import { LABEL, drawErrors, scale, valueAxis } from "./axis.js";
import { SvgPen } from "./pen.js";
import { drawKernel, drawPlasticity, drawProfile, drawScoreMap, profileRows } from "./detail_charts.js";
import { inWords } from "./in_words.js";
import { swatchOf } from "./swatch.js";
import { cameFrom, estimates, sureness } from "./sure.js";
import { toHash } from "./state.js";
import { tokenPart } from "./tokens.js";
import { inside } from "./view.js";

// Pairs of a term and its text, with what the term means where that is not plain.
function definition(entries) {
  return element("dl", { class: "facts-small" }, ...entries.flatMap(([term, text, title]) => [element("dt", { title }, term), element("dd", { title }, text)]));
}

// A drawing that says what is under the pointer.
function chart(app, label, width, height, draw) {
  const node = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "small-chart" });
  const hits = draw({ pen: new SvgPen(node), width, height, theme: app.theme(), app }) ?? [];
  const point = (event) => {
    const box = node.getBoundingClientRect();
    const [x, y] = [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
    const hit = hits.findLast((each) => inside(each, x, y));
    if (hit) app.tooltip.show(hit.lines, event.clientX, event.clientY);
    else app.tooltip.hide();
  };
  node.addEventListener("pointermove", point);
  node.addEventListener("pointerleave", () => app.tooltip.hide());
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
  const choices = store.state.both && data.choices.common ? ["common", "own"] : [choice];
  for (const [name, colour, mark, from] of choices.flatMap((each) => [["r_q", data.about.colours.blue, "circle", each], ["r_k", data.about.colours.red, "square", each]])) {
    const values = data.choices[from][name];
    const hollow = from === "common";
    const points = list.map((c, i) => [x(i), y(values[data.at(c, component, head)])]).filter(([, at]) => Number.isFinite(at));
    if (points.length > 1) g.pen.line(points, { stroke: colour, width: 2, dash: hollow ? [4, 3] : [] });
    for (const point of points) g.pen.mark(mark, ...point, list.length > 40 ? 1.5 : 3.4, hollow ? { fill: g.theme.paper, stroke: colour, width: 1.4 } : { fill: colour, stroke: g.theme.paper, width: 0.7 });
    drawErrors(g, x, y, list.map((c) => values[data.at(c, component, head)]), list.map((c) => data.error(name, { choice: from, component }, c, head)), [-1, 1]);
  }
  list.forEach((c, i) => {
    const code = source.category[data.at(c, component, head)];
    if (code !== data.absent) g.pen.rect(frame.left + i * step + 0.5, frame.bottom + 5, Math.max(1, step - 1), 7, headPaint(data, choice, data.at(c, component, head), g.theme));
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
    g.pen.rect(middle - Math.min(8, step * 0.35), g.height - 18 - tall, Math.min(16, step * 0.7), tall, { fill: partColours(g)[0], alpha: 0.6 });
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
    const name = data.categoryName(code, component);
    const swatch = swatchOf(app, code, data.kind("layer_kind", checkpoint, h), data.runsAgainst(choice, at));
    const label = `${data.name(h)}, ${name}, r_q ${correlation(source.r_q[at])}, r_k ${correlation(source.r_k[at])}`;
    return button(swatch, () => store.set({ head: h }), { class: "neighbour", "data-head": h, title: label, "aria-pressed": String(h === head) });
  });
  items.forEach((item, i) => item.append(data.name(same[i])));
  return element("div", { class: "neighbours", role: "group", "aria-label": `Heads of layer ${data.layers[head]}` }, ...items);
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
    ["category", `${data.categoryName(source.category[at], component)}${data.runsAgainst(choice, at) ? `, ${data.about.against.name}` : ""}`],
    ...(data.hasErrors ? [["confidence", sureness(data, store.state, checkpoint, head)]] : []),
    ...estimates(data, store.state, checkpoint, head).map(([name, text]) => [name, text, data.hasErrors ? "value ± 1 standard error over documents" : ""]),
    ["n", `${whole(source.n_q[at])} queries, ${whole(source.n_k[at])} keys`],
    ["window", Number.isFinite(source.window[at]) ? `${whole(source.window[at])} tokens` : "not recorded"],
    ["layer", `${kind[0] || "unknown"}${kind[1] ? `, ${kind[1]} attention` : ""}${Number.isFinite(reach) ? ` over ${whole(reach)} tokens` : ""}`],
    ["key head", Number.isFinite(data.number("kv_head", checkpoint, head)) ? whole(data.number("kv_head", checkpoint, head)) : "not recorded"],
  ]);
}

// The place of a head's value among those of all heads, the largest first; empty where it has none.
function rankOf(app, column, head) {
  const { data, store } = app;
  const { checkpoint } = store.state;
  const mine = column.at(store.state, checkpoint, head);
  if (!Number.isFinite(mine)) return "";
  const all = data.layers.map((_, h) => column.at(store.state, checkpoint, h)).filter(Number.isFinite);
  return ` (${all.filter((value) => value > mine).length + 1} of ${all.length})`;
}

// What every lens says about this head, folded lens by lens: value ± error, and its rank.
function lensFacts(app, head) {
  const { data, store } = app;
  const parts = data.lenses.filter((lens) => lens.listed.length).map((lens) => {
    // What is folded is worked out when it is unfolded: there are a hundred columns, each with a rank among all heads.
    const entries = () => lens.listed.map((column) => [column.title, column.text(store.state, store.state.checkpoint, head) + rankOf(app, column, head), column.definition]);
    const open = app.unfolded.has(lens.name);
    const toggled = () => {
      app.unfolded[node.open ? "add" : "delete"](lens.name);
      if (node.open && node.childElementCount < 2) node.append(definition(entries()));
    };
    const node = element("details", { open, "data-lens": lens.name, on: { toggle: toggled } }, element("summary", {}, lens.title), open ? definition(entries()) : null);
    return node;
  });
  return parts.length ? element("div", { class: "lens-facts" }, element("h4", {}, "Every metric: value ± error (rank among heads)"), ...parts) : null;
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
  const lead = one === null ? "Highest r_q: " : ["Changed most since ", named(data.checkpoints[one].label), ": "];
  const list = ranked.map(([h]) => button(data.name(h), () => store.set({ head: h }), { class: "chip" }));
  return element("p", { class: "movers" }, element("span", {}, ...[lead].flat()), ...(list.length ? list : ["no head is selected by the filters."]));
}

// What there is to see of a head beyond its numbers, once the details are unpacked.
function detailCharts(app, head, details) {
  const tokens = details.tables.sample ? [tokenPart(app, head, details, (label, height, draw) => chart(app, label, 400, height, draw))] : [];
  return [...windowCharts(app, head, details), ...tokens];
}

// What a chart draws: its rows; of a kernel its planes and its window, too.
function rowsOf({ data, store }, details, table, choice, head) {
  const { checkpoint } = store.state;
  const rows = (name) => details.rows(name, choice, checkpoint, head);
  return table === "kernel" ? { detail: rows("kernel"), planes: rows("planes"), window: data.window(choice, checkpoint) } : rows(table);
}

function windowCharts(app, head, details) {
  const { data, store } = app;
  const { checkpoint } = store.state;
  const name = data.name(head);
  if (!details.checkpoints.includes(checkpoint)) {
    if (!details.checkpoints.length) return [];
    return [element("p", { class: "about" }, `This file has profiles and maps for ${details.checkpoints.length} of ${data.checkpoints.length} ${data.noun}s: ${details.checkpoints.map((c) => data.checkpoints[c].label).join(", ")}.`)];
  }
  const charts = [
    ["profile", "Projection on PC0 by position (mean ± SD)", (g, of) => drawProfile(g, profileRows(of))],
    ["map", "Score map: which keys score higher", drawScoreMap],
    ["kernel", "Mean score by distance: rotated means (line), measured (marks)", drawKernel],
    ["plasticity", "Attention plasticity by query position", drawPlasticity],
  ];
  return charts.filter(([table]) => details.tables[table]).map(([table, title, drawIt]) => {
    const windows = shownWindows(app, table, checkpoint);
    const draw = (g) => drawWindows(g, windows, checkpoint, (choice) => rowsOf(app, details, table, choice, head), drawIt);
    return element("div", { "data-chart": table }, element("h4", {}, title), chart(app, `${title}, ${name}`, 400, stackedHeight(windows, 400, table === "map" ? 260 : 200), draw));
  });
}

function header(app, node) {
  const { data, store } = app;
  const heading = element("h3", { id: "title-head", tabindex: "-1" });
  const step = (by) => store.set({ head: ((store.state.head ?? 0) + by + data.nHeads) % data.nHeads });
  const link = element("a", { class: "permalink" }, "link to this head");
  const copy = () => copyText(app, window.location.href.replace(/#.*$/, "") + toHash(data, store.state), "Link copied");
  const tools = [link, button("Copy link", copy, { class: "tool" }), button("⇄", () => node().classList.toggle("left"), { class: "tool", id: "move-drawer", "aria-label": "Move this panel to the other side" }), button("‹", () => step(-1), { class: "tool", "aria-label": "Previous head" }), button("›", () => step(1), { class: "tool", "aria-label": "Next head" }), button("Close", () => store.set({ head: null }), { class: "tool", id: "close-head" })];
  const update = () => {
    const { head, checkpoint } = store.state;
    heading.replaceChildren(`Head ${data.name(head)} ${data.atOrIn} `, named(data.checkpoints[checkpoint].label));
    link.setAttribute("href", toHash(data, store.state));
  };
  return { node: element("div", { class: "view-head" }, heading, element("div", { class: "tools" }, ...tools)), heading, update };
}

function fill(app, body, head, details) {
  const { data } = app;
  const name = data.name(head);
  const again = body.contains(document.activeElement) ? whereFocus(document.activeElement, head) : null;
  body.replaceChildren(
    element("p", { class: "in-words" }, inWords(app, head)),
    ...(details ? detailCharts(app, head, details) : []),
    about(app, head),
    ...(data.oneRun && data.checkpoints.length > 1 ? [element("div", {}, element("h4", {}, "Over training: ", element("span", { class: "is-q" }, sign(app, "blue", "circle"), " r_q"), " ", element("span", { class: "is-k" }, sign(app, "red", "square"), " r_k"), app.store.state.both ? " (hollow: common window)" : ""), chart(app, `Path of ${name} over training`, 400, 210, (g) => drawPath(g, head)))] : []),
    element("div", {}, element("h4", {}, `All ${data.components.length} components`), chart(app, `Components of ${name}`, 400, 210, (g) => drawComponents(g, head))),
    ...[lensFacts(app, head)].filter(Boolean),
    element("h4", {}, `Layer ${data.layers[head]}`),
    neighbours(app, head),
  );
  if (again) body.querySelector(again)?.focus({ preventScroll: true });
}

// What gets the focus when the drawer is filled again: the chosen neighbour, or the menu that was used.
function whereFocus({ dataset }, head) {
  if (dataset.control) return `[data-control="${dataset.control}"]`;
  return dataset.head === undefined ? null : `[data-head="${head}"]`;
}

// Chips to start from when nothing is chosen.
export function startChips(app) {
  const node = element("div", {});
  const draw = () => node.replaceChildren(movers(app));
  const uses = ["checkpoint", "component", "choice", "layers", "hidden", "brush"];
  app.store.subscribe((changed) => uses.some((key) => changed.has(key)) && draw());
  draw();
  return node;
}

// Where the drawer opens: on the left where the right side would hide what was clicked or has the focus. As a sheet over
// the whole width of a small screen it comes from below or from above, as high as that leaves room. Nothing else on the
// page moves.
const CLEAR = 28; // pixels around what was clicked
function placeDrawer(node, at) {
  const { width } = node.getBoundingClientRect();
  const sheet = width > 0.9 * window.innerWidth;
  node.classList.toggle("left", !sheet && at !== null && at.x > window.innerWidth - width && at.x > width);
  const [top, bottom] = ["--drawer-top", "--drawer-bottom"].map((name) => parseFloat(node.style.getPropertyValue(name)) || 0);
  const [above, below] = at === null ? [0, window.innerHeight] : [at.y - CLEAR - top, window.innerHeight - bottom - at.y - CLEAR];
  node.classList.toggle("above", sheet && above > below);
  node.style.setProperty("--room", `${Math.max(above, below)}px`);
}

const middleOf = (target) => {
  const { left, top, width, height } = target.getBoundingClientRect();
  return { x: left + width / 2, y: top + height / 2 };
};

// The drawer takes the room below the bar, or above it where that is more: the controls of all views stay free.
function besideBar(node) {
  const fit = () => {
    const { top, bottom } = document.querySelector(".bar").getBoundingClientRect();
    const high = window.innerHeight;
    const seen = bottom > 0 && top < high;
    const above = top > high - bottom;
    node.style.setProperty("--drawer-top", `${seen && !above ? bottom : 0}px`);
    node.style.setProperty("--drawer-bottom", `${seen && above ? high - top : 0}px`);
  };
  for (const event of ["scroll", "resize"]) window.addEventListener(event, () => node.hidden || fit(), { passive: true });
  return fit;
}

// Where a reader acted last: the place of the pointer, or the middle of what has the focus.
function watchActions() {
  let at = null;
  const free = (target) => Boolean(target?.closest?.(".bar")); // the drawer never covers the bar
  document.addEventListener("pointerdown", (event) => (at = free(event.target) ? null : { x: event.clientX, y: event.clientY }), { capture: true });
  document.addEventListener("keydown", () => (at = null), { capture: true });
  return () => {
    const active = document.activeElement;
    return at ?? (!active || active === document.body || free(active) ? null : middleOf(active));
  };
}

export function headDrawer(app) {
  const { store, data } = app;
  app.unfolded = new Set();
  const top = header(app, () => node);
  const body = element("div", { class: "drawer-body", tabindex: "0", role: "region", "aria-label": "About this head" });
  const node = element("aside", { class: "drawer", id: "head", "aria-labelledby": "title-head", hidden: true }, top.node, body);
  const [lastAction, fit] = [watchActions(), besideBar(node)];
  let [details, opener, asked] = [null, null, false];
  const draw = () => {
    const { head } = store.state;
    node.hidden = head === null;
    if (head === null) return;
    if (node.isConnected) fit();
    top.update();
    fill(app, body, head, details);
    if (!asked) {
      asked = true;
      data.later().then((later) => {
        details = later.details;
        draw();
      });
    }
  };
  store.subscribe((changed) => {
    if (changed.has("head")) {
      const opens = node.hidden && store.state.head !== null;
      const active = document.activeElement;
      if (opens && active && active !== document.body) opener = active;
      if (store.state.head === null && node.contains(active)) queueMicrotask(() => (opener?.isConnected ? opener : document.getElementById("search"))?.focus({ preventScroll: true }));
      if (opens) {
        body.scrollTop = 0;
        node.hidden = false;
        app.tooltip.hide();
        fit();
        placeDrawer(node, lastAction());
      }
    }
    if (["head", "checkpoint", "component", "choice", "both", "layers", "hidden", "brush", "theme", "tokenAxes", "tokenDocument"].some((key) => changed.has(key))) draw();
  });
  node.addEventListener("focusin", ({ relatedTarget: from }) => {
    if (from && !node.contains(from)) opener = from; // a reader who goes into the drawer comes back from it to there
  });
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") store.set({ head: null });
  });
  // What gets the focus by the keyboard must not be behind it.
  document.addEventListener("focusin", ({ target }) => {
    if (node.hidden || node.contains(target) || !target.matches?.(":focus-visible")) return;
    const [at, { left, right, top: high, bottom: low }] = [middleOf(target), node.getBoundingClientRect()];
    if (at.x > left && at.x < right && (right - left < 0.9 * window.innerWidth || (at.y > high && at.y < low))) placeDrawer(node, at);
  });
  draw();
  return { node };
}
