// The first screen: the headline, the findings with their charts, and the heads to start with. All of it was written in
// Python (report/summary.py), which the terminal and `results.summary()` print too; here it is only drawn.

import { SvgPen, textWidth } from "./pen.js";
import { axisOf, extent, significant } from "./numbers.js";
import { button, element, svgElement } from "./dom.js";
import { correlation, headName, percent, shorten } from "./format.js";
import { drawProfile } from "./detail_charts.js";
import { categoryColour } from "./colours.js";
import { scale } from "./axis.js";

const TEXT = 10.5;
const [WIDE, TALL] = [350, 196];
const SORTS = {
  both: ["Both track position", "Later tokens have larger projections, in queries and in keys."],
  against: ["Keys track it in reverse", "Later queries have larger projections, later keys smaller ones."],
  neither: ["Neither tracks position", "Position does not predict the projection."],
};

function svg(app, label, [width, height], draw) {
  const node = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "small-chart" });
  const paint = () => {
    node.replaceChildren();
    draw({ pen: new SvgPen(node), width, height, theme: app.theme(), app });
  };
  app.store.subscribe((changed) => changed.has("theme") && paint());
  paint();
  return node;
}

const number = (values) => values.map((value) => value ?? NaN);

function colourOf(g, measure) {
  const { colours } = g.app.data.about;
  const category = g.app.data.categories.find(({ name }) => name === measure);
  return (category && categoryColour(category, g.theme)) ?? { r_q: colours.blue, r_k: colours.red }[measure] ?? g.theme.ink;
}

// What is on an axis: values next to it or below it, in one line.
function nameAxis(g, frame, text, vertical) {
  const [x, y] = vertical ? [11, (frame.top + frame.bottom) / 2] : [(frame.left + frame.right) / 2, g.height - 4];
  g.pen.text(text, x, y, { size: TEXT, anchor: "middle", rotate: vertical ? -90 : 0, fill: g.theme.muted });
}

// The measures by their colours, in one line above the drawing; one measure is named by the title.
function drawLegend(g, lines) {
  let at = 52;
  const named = lines.filter(({ common }) => !common);
  for (const { label, measure } of named.length > 1 ? named : []) {
    g.pen.circle(at + 3, 9, 3, { fill: colourOf(g, measure) });
    g.pen.text(label, at + 10, 12.5, { size: TEXT, fill: g.theme.muted });
    at += 22 + textWidth(label, TEXT);
  }
}

// Names below the first and the last entry, or below each where there are few and they have no order.
function drawNames(g, frame, x, count) {
  const { checkpoints, oneRun } = g.app.data;
  const named = checkpoints.map((_, i) => i).filter((i) => i === 0 || i === count - 1 || (!oneRun && count <= 6));
  const room = (frame.right - frame.left) / Math.max(1, named.length);
  for (const i of named) {
    const letters = Array.from(checkpoints[i].label).length;
    const text = Array.from({ length: letters }, (_, less) => shorten(checkpoints[i].label, letters - less)).find((each) => textWidth(each, TEXT) <= room) ?? "";
    const anchor = count < 2 ? "middle" : i === 0 ? "start" : i === count - 1 ? "end" : "middle";
    g.pen.text(text, anchor === "start" ? frame.left : anchor === "end" ? frame.right : x(i), frame.bottom + 15, { size: TEXT, anchor, fill: g.theme.muted });
  }
}

// Means by checkpoint with ± 1 standard error over documents.
function drawLines(g, finding) {
  const lines = finding.lines.map((line) => ({ ...line, means: number(line.means), errors: number(line.errors) }));
  const around = lines.flatMap(({ means, errors }) => means.flatMap((mean, i) => [mean - (errors[i] || 0), mean + (errors[i] || 0)]));
  const axis = axisOf(extent(around), finding.share ? [0, 1] : [-1, 1], { zero: true, parts: 3 });
  const count = lines[0].means.length;
  const frame = { left: 52, right: g.width - 8, top: 24, bottom: g.height - 38 };
  const x = (i) => (count < 2 ? (frame.left + frame.right) / 2 : frame.left + 6 + (i * (frame.right - frame.left - 12)) / (count - 1));
  const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
  for (const tick of axis.ticks) {
    g.pen.line([[frame.left, y(tick)], [frame.right, y(tick)]], { stroke: g.theme.faint });
    g.pen.text(finding.share ? percent(tick) : axis.text(tick), frame.left - 5, y(tick) + 3.5, { size: TEXT, anchor: "end", fill: g.theme.muted });
  }
  for (const { measure, common, means, errors } of [...lines].reverse()) {
    const colour = colourOf(g, measure);
    const points = means.map((mean, i) => [x(i), y(mean)]).filter(([, at]) => Number.isFinite(at));
    if (g.app.data.oneRun && points.length > 1) g.pen.line(points, { stroke: colour, width: 1.8, dash: common ? [4, 3] : [] });
    means.forEach((mean, i) => Number.isFinite(mean + errors[i]) && g.pen.line([[x(i), y(mean - errors[i])], [x(i), y(mean + errors[i])]], { stroke: g.theme.ink, width: 1 }));
    const r = count > 40 ? 1.4 : 2.8;
    for (const point of points) g.pen.circle(...point, r, common ? { fill: g.theme.paper, stroke: colour, width: 1.3 } : { fill: colour });
  }
  drawLegend(g, lines);
  drawNames(g, frame, x, count);
  nameAxis(g, frame, finding.axis, true);
  nameAxis(g, frame, g.app.data.noun, false);
}

// Causes by their names (lenses/rope/steps.py): the colors of the waterfall and of the figures.
const CAUSES = { window: "window", "context length": "window", "window and RoPE base together": "window", "context length and RoPE base": "window", "RoPE base": "base", weights: "weights", unexplained: "unexplained" };

// Contributions, or costs of single heads, as bars from 0 with ± 1 standard error.
function drawBars(g, finding) {
  const bars = finding.bars.map((bar) => ({ ...bar, value: bar.value ?? NaN, error: bar.error ?? NaN }));
  const [low, high] = extent(bars.flatMap(({ value, error }) => [value - (error || 0), value + (error || 0), 0])) ?? [0, 1];
  const longest = Math.max(...bars.map(({ label }) => textWidth(label, TEXT + 0.5)));
  const frame = { left: Math.min(g.width / 2, 12 + longest), right: g.width - 52, top: 10, bottom: g.height - 36 };
  const x = scale(low === high ? [0, 1] : [low, high], [frame.left, frame.right]);
  const down = (frame.bottom - frame.top) / bars.length;
  bars.forEach(({ label, value, error }, i) => {
    const [top, middle] = [frame.top + i * down, frame.top + (i + 0.5) * down];
    g.pen.text(label, frame.left - 6, middle + 4, { size: TEXT + 0.5, anchor: "end", fill: g.theme.ink });
    if (!Number.isFinite(value)) return;
    g.pen.rect(Math.min(x(0), x(value)), top + 3, Math.abs(x(value) - x(0)), Math.max(2, down - 6), { fill: g.app.data.about.colours.causes[CAUSES[label]] ?? g.theme.muted, stroke: g.theme.line, width: 0.6 });
    if (Number.isFinite(error)) g.pen.line([[x(value - error), middle], [x(value + error), middle]], { stroke: g.theme.ink, width: 1.4 });
    g.pen.text(`${value > 0 ? "+" : ""}${significant(value, 2)}`, Math.max(x(value + (error || 0)), x(0)) + 4, middle + 4, { size: TEXT, fill: g.theme.muted });
  });
  g.pen.line([[x(0), frame.top], [x(0), frame.bottom]], { stroke: g.theme.line });
  g.pen.text("0", x(0), frame.bottom + 14, { size: TEXT, anchor: "middle", fill: g.theme.muted });
  nameAxis(g, frame, finding.axis, false);
}

function findingNode(app, finding) {
  const draw = finding.lines.length ? drawLines : drawBars;
  const hasChart = finding.lines.length + finding.bars.length > 0;
  const chart = hasChart ? element("figure", { class: "finding-chart" }, element("figcaption", {}, finding.title, finding.lines.some(({ common }) => common) ? element("span", {}, " Solid: native length. Hollow: common window.") : null), svg(app, finding.title, [WIDE, TALL], (g) => draw(g, finding))) : null;
  return element("li", { class: "finding" }, element("h2", {}, finding.question), element("p", {}, finding.text, " ", element("span", { class: "badge" }, finding.badge)), chart);
}

function openHead(app, { layer, head }) {
  const name = headName(layer, head);
  return button(name, () => app.store.set({ head: app.data.byName.get(name), checkpoint: app.data.checkpoints.length - 1 }), { class: "linklike" });
}

function startWith(app, heads) {
  if (!heads.length) return null;
  const items = heads.map((each) => element("li", {}, openHead(app, each), ` ${each.reason}`));
  return element("section", { class: "start", "aria-labelledby": "h-start" }, element("h2", { id: "h-start" }, "Start with these heads"), element("ul", {}, ...items));
}

function example(app, { sort, layer, head, r_q: q, r_k: k, profile }) {
  const [title, words] = SORTS[sort];
  const rows = profile.map(number);
  const chart = rows.length ? svg(app, `Projections of queries and keys of ${headName(layer, head)} by position`, [340, 140], (g) => drawProfile(g, rows, { labels: false })) : null;
  return element("figure", { class: "example" }, element("figcaption", {}, element("strong", {}, title), ` ${words} `, openHead(app, { layer, head }), ` r_q ${correlation(q)}, r_k ${correlation(k)}`), chart);
}

// How to read the two numbers, with three heads of this study; it stands before all views of single heads.
export function howToRead(app) {
  const { examples } = app.data.about.summary;
  const missing = Object.keys(SORTS).filter((sort) => !examples.some((each) => each.sort === sort)).map((sort) => SORTS[sort][0].toLowerCase());
  return element(
    "section", { class: `how how-${examples.length}`, "aria-labelledby": "h-how" },
    element("div", {}, element("h3", { id: "h-how" }, "How to read r_q and r_k"), element("p", { class: "intro" }, "Project a head’s queries onto the direction in which its queries and keys vary most (PC0). r_q is the correlation of that projection with token position: 0 none, 1 a straight line. r_k is the same for keys; below 0, keys move the opposite way. NoPE layers apply no rotation.", missing.length ? ` No head here is an example of “${missing.join("” or “")}”.` : "")),
    element("div", { class: "examples" }, ...examples.map((each) => example(app, each))),
  );
}

// One finding's sentence, for the section that shows the same in detail.
export function takeaway(app, question) {
  return app.data.about.summary.findings.find((each) => each.question === question)?.text ?? null;
}

export function firstScreen(app) {
  const { about } = app.data;
  const { headline, findings, heads, certainty } = about.summary;
  const facts = about.facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", { dir: "auto" }, text)));
  return element(
    "header", { class: "hero" },
    element("p", { class: "kicker" }, "qkscope report on ", element("span", { class: "study", dir: "auto" }, about.title)),
    element("h1", { class: "headline" }, headline),
    element("ul", { class: `findings findings-${findings.length}` }, ...findings.map((finding) => findingNode(app, finding))),
    element("div", { class: "start-row" }, startWith(app, heads), element("p", { class: "certainty" }, element("strong", {}, "How certain is this? "), certainty)),
    element("dl", { class: "facts" }, ...facts),
  );
}
