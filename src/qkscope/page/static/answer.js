// The first screen: the question, the verdict, how to read r_q and r_k with three heads of this study, three findings.

import { SvgPen, textWidth } from "./pen.js";
import { partColours } from "./colours.js";
import { axisOf, extent, significant } from "./numbers.js";
import { button, element, svgElement } from "./dom.js";
import { correlation, headName, percent, shorten } from "./format.js";
import { drawProfile } from "./detail_charts.js";
import { scale } from "./axis.js";

const [MOST_NAMED, NAME] = [6, 9.5]; // entries whose dots have names, and the size of these
const SORTS = {
  both: ["Both follow", "Later tokens have larger projections, in queries and in keys."],
  against: ["Keys run against", "Later queries have larger projections, later keys smaller ones."],
  neither: ["Neither follows", "Where a token stands says nothing about its projection."],
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

function example(app, { sort, layer, head, r_q: q, r_k: k, profile }) {
  const [title, words] = SORTS[sort];
  const name = headName(layer, head);
  const open = () => app.store.set({ head: app.data.byName.get(name), checkpoint: app.data.checkpoints.length - 1 });
  const rows = profile.map((row) => row.map((value) => value ?? NaN));
  const chart = rows.length ? svg(app, `Projections of queries and keys of ${name} by position`, [340, 140], (g) => drawProfile(g, rows, { labels: false })) : null;
  return element("figure", { class: "example" }, element("figcaption", {}, element("strong", {}, title), ` ${words} `, button(`${name}: r_q ${correlation(q)}, r_k ${correlation(k)}`, open, { class: "linklike" })), chart);
}

function howToRead(app) {
  const { examples } = app.data.about.answer;
  const missing = Object.keys(SORTS).filter((sort) => !examples.some((each) => each.sort === sort)).map((sort) => SORTS[sort][0].toLowerCase());
  return element(
    "section", { class: `how how-${examples.length}`, "aria-labelledby": "h-how" },
    element("div", {}, element("h2", { id: "h-how" }, "How to read r_q and r_k"), element("p", { class: "intro" }, "Project a head’s queries onto the one direction in which its queries and keys vary most (PC0). r_q is how closely that projection follows the token’s position: 0 not at all, 1 a straight line. r_k is the same for keys; below 0, keys move the opposite way. NoPE layers give queries and keys no position by rotation.", missing.length ? ` No head here is an example of “${missing.join("” or “")}”.` : "")),
    element("div", { class: "examples" }, ...examples.map((each) => example(app, each))),
  );
}

// The finding as a small chart: own context solid, common window hollow, ± 1 standard error.
function drawSpark(g, finding) {
  const { colours } = g.app.data.about;
  const colour = finding.name === "r_q" ? colours.blue : finding.name === "r_k" ? colours.red : g.theme.ink;
  const all = Object.entries(finding.series).map(([choice, { means, errors }]) => ({ choice, means: means.map((v) => v ?? NaN), errors: errors.map((v) => v ?? NaN) }));
  const axis = axisOf(extent(all.flatMap((s) => s.means.flatMap((m, i) => [m - (s.errors[i] || 0), m + (s.errors[i] || 0)]))), finding.share ? [0, 1] : [-1, 1], { zero: true, parts: 2 });
  const count = all[0].means.length;
  const isNamed = !g.app.data.oneRun && count <= MOST_NAMED;
  const frame = { left: 34, right: g.width - 8, top: 8, bottom: g.height - (isNamed ? 22 : 8) };
  const x = (i) => (count < 2 ? (frame.left + frame.right) / 2 : frame.left + 6 + (i * (frame.right - frame.left - 12)) / (count - 1));
  const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
  for (const tick of axis.ticks) {
    g.pen.line([[frame.left, y(tick)], [frame.right, y(tick)]], { stroke: g.theme.faint });
    g.pen.text(finding.share ? percent(tick) : axis.text(tick), frame.left - 4, y(tick) + 3.5, { size: 10, anchor: "end", fill: g.theme.muted });
  }
  for (const { choice, means, errors } of all.reverse()) {
    const points = means.map((m, i) => [x(i), y(m)]).filter(([, at]) => Number.isFinite(at));
    const hollow = choice === "common";
    if (g.app.data.oneRun && points.length > 1) g.pen.line(points, { stroke: colour, width: 1.8, dash: hollow ? [4, 3] : [] });
    means.forEach((m, i) => Number.isFinite(m + errors[i]) && g.pen.line([[x(i), y(m - errors[i])], [x(i), y(m + errors[i])]], { stroke: g.theme.ink, width: 1 }));
    const r = count > 40 ? 1.4 : 2.8;
    for (const point of points) g.pen.circle(...point, r, hollow ? { fill: g.theme.paper, stroke: colour, width: 1.3 } : { fill: colour });
  }
  if (isNamed) nameEntries(g, frame, x, count);
}

// Entries without an order have their names below their dots, each as long as its place allows.
function nameEntries(g, frame, x, count) {
  const room = count < 2 ? frame.right - frame.left : (frame.right - frame.left - 12) / (count - 1) - 6;
  g.app.data.checkpoints.forEach(({ label }, i) => {
    const isEnd = count > 1 && (i === 0 || i === count - 1); // half of its place is beyond the frame
    const wide = isEnd ? room * 0.7 : room;
    const letters = Array.from(label).length;
    const fitting = Array.from({ length: letters }, (_, less) => shorten(label, letters - less)).find((text) => textWidth(text, NAME) <= wide) ?? "";
    const [at, anchor] = !isEnd ? [x(i), "middle"] : i === 0 ? [frame.left - 20, "start"] : [g.width - 1, "end"];
    g.pen.text(fitting, at, frame.bottom + 15, { size: NAME, anchor, fill: g.theme.muted });
  });
}

// Places of causes among the colours of parts.
const COLOURS = { window: 0, "window + base": 0, base: 1, weights: 2, unexplained: 3 };

// The change from first to last by cause, as bars from 0.
function drawParts(g, finding) {
  const bars = [{ name: "measured", ...finding.change }, ...finding.parts].map((each) => ({ ...each, value: each.value ?? NaN, error: each.error ?? NaN }));
  const ends = extent(bars.flatMap((b) => [b.value - (b.error || 0), b.value + (b.error || 0), 0])) ?? [0, 1];
  const longest = Math.max(...bars.map((each) => each.name.length));
  const frame = { left: Math.max(78, 10 + 7 * longest), right: g.width - 44, top: 4 }; // room for the longest name
  const x = scale(ends[0] === ends[1] ? [0, 1] : ends, [frame.left, frame.right]);
  const down = (g.height - 8) / bars.length;
  const parts = partColours(g);
  bars.forEach((bar, i) => {
    const top = frame.top + i * down;
    g.pen.text(bar.name, frame.left - 6, top + down / 2 + 4, { size: 11, anchor: "end", fill: g.theme.ink });
    if (!Number.isFinite(bar.value)) return;
    g.pen.rect(Math.min(x(0), x(bar.value)), top + 3, Math.abs(x(bar.value) - x(0)), down - 6, { fill: i ? parts[COLOURS[bar.name]] : g.theme.ink, alpha: 0.85 });
    if (Number.isFinite(bar.error)) g.pen.line([[x(bar.value - bar.error), top + down / 2], [x(bar.value + bar.error), top + down / 2]], { stroke: g.theme.muted, width: 1.6 });
    g.pen.text(`${bar.value > 0 ? "+" : ""}${significant(bar.value, 2)}`, Math.max(x(bar.value + (bar.error || 0)), x(0)) + 4, top + down / 2 + 4, { size: 10.5, fill: g.theme.muted });
  });
  g.pen.line([[x(0), frame.top], [x(0), g.height - 4]], { stroke: g.theme.line });
}

function findingNode(app, finding) {
  const badges = finding.badges.map(({ kind, text }) => element("span", { class: `badge badge-${kind}` }, text));
  const chart = finding.series ? svg(app, `By ${app.data.noun}`, [330, 110], (g) => drawSpark(g, finding)) : svg(app, "Change by cause", [330, 110], (g) => drawParts(g, finding));
  return element("li", { class: "finding" }, chart, element("p", {}, finding.text, " ", ...badges));
}

export function hero(app) {
  const { about } = app.data;
  const facts = about.facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", { dir: "auto" }, text)));
  return element(
    "header", { class: "hero" },
    element("p", { class: "kicker" }, "qkscope report on ", element("span", { class: "study", dir: "auto" }, about.title)),
    element("h1", {}, about.answer.question),
    element("p", { class: "verdict" }, about.answer.verdict),
    element("ul", { class: "findings" }, ...about.answer.findings.map((finding) => findingNode(app, finding))),
    howToRead(app),
    element("dl", { class: "facts" }, ...facts),
  );
}
