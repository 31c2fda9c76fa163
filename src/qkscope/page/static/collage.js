// Single tokens of one head: kept queries and keys along two of its axes, stronger with position; one document over the
// others; the tokens that lie farthest out by name.

import { LABEL, scale, valueAxis } from "./axis.js";
import { axisOf, extent, significant } from "./numbers.js";
import { correlation, percent, whole } from "./format.js";
import { textWidth } from "./pen.js";

const FAINTEST = 0.25; // how strong the first position is drawn
const NAMED = 3; // tokens of each kind that are named
const NAME = 10.5; // the size of names
const LETTERS = 14; // of a name
const MARKS = { q: ["query", "circle", "blue"], k: ["key", "square", "red"] };

export function axisName(axis) {
  return { a: "a (drift)", b: "b (separation)" }[axis] ?? axis.toUpperCase();
}

// The axes that a page has of kept tokens, components first.
export function tokenAxes(data) {
  const columns = data.about.data.detail.tables.sample?.columns ?? [];
  const axes = columns.filter((name) => name.startsWith("q_") && columns.includes(`k${name.slice(1)}`)).map((name) => name.slice(2));
  const components = axes.filter((axis) => /^pc\d+$/.test(axis)).sort((one, other) => Number(one.slice(2)) - Number(other.slice(2)));
  return [...components, ...axes.filter((axis) => !components.includes(axis))];
}

// The kept tokens as points; those without a number are left out.
export function collagePoints(detail, [across, up]) {
  const points = (detail?.position ?? []).flatMap((position, i) => Object.keys(MARKS).map((kind) => ({
    kind, position, document: detail.document[i], text: detail.text?.[i] ?? "", spread: detail.spread[i] === 1,
    x: detail[`${kind}_${across}`]?.[i], y: detail[`${kind}_${up}`]?.[i],
  })));
  return points.filter((p) => Number.isFinite(p.position + p.x + p.y));
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// How far points are from the line in position through those of the even sample, in standard deviations of what that
// line leaves (Mahalanobis's distance), as `qkscope collage` has it; 0 where these lie on their line.
export function distances(points) {
  const even = points.filter((p) => p.spread);
  if (even.length < 3) return points.map(() => 0);
  const [t, x, y] = ["position", "x", "y"].map((name) => mean(even.map((p) => p[name])));
  const size = even.reduce((sum, p) => sum + (p.position - t) ** 2, 0);
  const slope = (name, centre) => (size ? even.reduce((sum, p) => sum + (p.position - t) * (p[name] - centre), 0) / size : 0);
  const [slopeX, slopeY] = [slope("x", x), slope("y", y)];
  const rest = (p) => [p.x - x - slopeX * (p.position - t), p.y - y - slopeY * (p.position - t)];
  const left = even.map(rest);
  const [a, b, c] = [[0, 0], [0, 1], [1, 1]].map(([i, j]) => mean(left.map((each) => each[i] * each[j])));
  if (a + c <= 1e-20 * mean(even.map((p) => p.x ** 2 + p.y ** 2))) return points.map(() => 0);
  const half = Math.hypot((a - c) / 2, b);
  const [large, small] = [(a + c) / 2 + half, (a + c) / 2 - half];
  const angle = Math.atan2(2 * b, a - c) / 2; // of the longer axis of the cloud
  return points.map((p) => {
    const [dx, dy] = rest(p);
    const [along, aside] = [dx * Math.cos(angle) + dy * Math.sin(angle), dy * Math.cos(angle) - dx * Math.sin(angle)];
    return Math.sqrt(along ** 2 / large + (small > 1e-12 * large ? aside ** 2 / small : 0));
  });
}

// The tokens of each kind that lie farthest from their line, the farthest first; of one document where one is chosen.
export function farthest(points, document = null) {
  return Object.keys(MARKS).flatMap((kind) => {
    const mine = points.filter((p) => p.kind === kind);
    const far = distances(mine);
    const ranked = mine.map((p, i) => ({ ...p, distance: far[i] })).filter((p) => document === null || p.document === document);
    return ranked.filter((p) => p.distance > 0).sort((one, other) => other.distance - one.distance).slice(0, NAMED);
  });
}

// A token's text with everything seen that is not a letter, or where the token is.
export function tokenName({ text, document, position }) {
  if (!text) return `document ${whole(document)}, ${whole(position)}`;
  const spelled = Array.from(JSON.stringify(text).slice(1, -1));
  return `“${spelled.length > LETTERS ? `${spelled.slice(0, LETTERS - 1).join("")}…` : spelled.join("")}”`;
}

// The farthest tokens in a sentence.
export function farthestWords(points, document) {
  const words = farthest(points, document).map((p) => `${MARKS[p.kind][0]} ${p.text ? `${tokenName(p)} (document ${whole(p.document)}, position ${whole(p.position)})` : `at document ${whole(p.document)}, position ${whole(p.position)}`}`);
  return words.length ? `Farthest from their line in position: ${words.join("; ")}.` : "";
}

// What two axes are worth in a head: explained variance and correlations of its components.
export function axesWords(data, checkpoint, head, axes) {
  const words = axes.filter((axis) => axis.startsWith("pc")).map((axis) => {
    const source = data.choices.own;
    const at = data.at(checkpoint, data.components.indexOf(Number(axis.slice(2))), head);
    return `${axisName(axis)}: ${percent(source.explained_variance[at])} of the variance, r_q ${correlation(source.r_q[at])}, r_k ${correlation(source.r_k[at])}`;
  });
  return words.length ? `${words.join("; ")}.` : "";
}

function key(g, frame, ends) {
  let at = 2;
  for (const [name, mark, colour] of Object.values(MARKS)) {
    g.pen.mark(mark, at + 4, 8, 4, { fill: g.app.data.about.colours[colour] });
    g.pen.text(name === "key" ? "keys" : "queries", at + 12, 12, { size: LABEL, fill: g.theme.ink });
    at += 70;
  }
  g.pen.text(`faint to strong: position ${whole(ends[0])} to ${whole(ends[1])}`, frame.right, 12, { size: LABEL, anchor: "end", fill: g.theme.muted });
}

// Names beside their points; one that would stand on another is left out.
function drawNames(g, frame, tokens, x, y) {
  const taken = [];
  for (const p of tokens) {
    const name = tokenName(p);
    const wide = textWidth(name, NAME);
    const left = x(p.x) + 5 + wide <= frame.right ? x(p.x) + 5 : x(p.x) - 5 - wide;
    const top = Math.max(frame.top, y(p.y) - 4 - NAME);
    if (taken.some((box) => left < box.left + box.wide && box.left < left + wide && Math.abs(top - box.top) < NAME + 1)) continue;
    taken.push({ left, wide, top });
    g.pen.text(name, left, top + NAME, { size: NAME, fill: g.theme.ink });
  }
}

export function drawCollage(g, detail, { axes, document }) {
  const points = collagePoints(detail, axes);
  if (!points.length) {
    g.pen.text("No vectors of this head were kept.", g.width / 2, g.height / 2, { size: 12.5, anchor: "middle", fill: g.theme.muted });
    return [];
  }
  const { colours } = g.app.data.about;
  const frame = { left: 46, right: g.width - 12, top: 38, bottom: g.height - 34 };
  const [across, up] = ["x", "y"].map((name) => axisOf(extent(points.map((p) => p[name])), null, { parts: 5 }));
  const x = scale([across.low, across.high], [frame.left + 6, frame.right - 6]);
  const y = scale([up.low, up.high], [frame.bottom - 4, frame.top + 4]);
  valueAxis(g, frame, y, up.ticks, up.text);
  for (const tick of across.ticks) g.pen.text(across.text(tick), x(tick), frame.bottom + 15, { size: LABEL, anchor: "middle", fill: g.theme.muted });
  g.pen.text(`${axisName(axes[0])} →`, frame.right, frame.bottom + 29, { size: LABEL, anchor: "end", fill: g.theme.ink });
  g.pen.text(`${axisName(axes[1])} ↑`, 2, frame.top - 6, { size: LABEL, fill: g.theme.ink });
  const ends = extent(points.map((p) => p.position));
  const strength = (position) => FAINTEST + (1 - FAINTEST) * (ends[1] > ends[0] ? (position - ends[0]) / (ends[1] - ends[0]) : 1);
  const shown = document === null ? points : points.filter((p) => p.document === document);
  for (const p of points) if (!shown.includes(p)) g.pen.mark(MARKS[p.kind][1], x(p.x), y(p.y), 2.4, { fill: g.theme.faint, alpha: 0.9 });
  for (const p of shown) g.pen.mark(MARKS[p.kind][1], x(p.x), y(p.y), 3, { fill: colours[MARKS[p.kind][2]], alpha: strength(p.position) });
  drawNames(g, frame, farthest(points, document), x, y);
  key(g, frame, ends);
  return shown.map((p) => ({
    x: x(p.x) - 5, y: y(p.y) - 5, w: 10, h: 10,
    lines: [`${MARKS[p.kind][0]}${p.text ? ` of ${tokenName(p)}` : ""}`, `document ${whole(p.document)}, position ${whole(p.position)}`, `${axisName(axes[0])} ${significant(p.x, 2)}, ${axisName(axes[1])} ${significant(p.y, 2)}`],
  }));
}
