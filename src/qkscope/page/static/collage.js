// Single tokens of one head: kept queries and keys along its first two components, stronger with position.

import { LABEL, scale, valueAxis } from "./axis.js";
import { axisOf, extent } from "./numbers.js";
import { whole } from "./format.js";

const FAINTEST = 0.25; // how strong the first position is drawn

// The kept tokens as points: kind, position and place; those without a number are left out.
export function collagePoints(detail) {
  const points = (detail?.position ?? []).flatMap((position, i) => [
    { kind: "q", position, x: detail.q_pc0[i], y: detail.q_pc1[i] },
    { kind: "k", position, x: detail.k_pc0[i], y: detail.k_pc1[i] },
  ]);
  return points.filter((p) => Number.isFinite(p.position + p.x + p.y));
}

function key(g, frame, ends) {
  const { blue, red } = g.app.data.about.colours;
  let at = frame.left;
  for (const [name, colour, mark] of [["queries", blue, "circle"], ["keys", red, "square"]]) {
    g.pen.mark(mark, at + 4, 8, 4, { fill: colour });
    g.pen.text(name, at + 12, 12, { size: LABEL, fill: g.theme.ink });
    at += 70;
  }
  g.pen.text(`faint to strong: position ${whole(ends[0])} to ${whole(ends[1])}`, frame.right, 12, { size: LABEL, anchor: "end", fill: g.theme.muted });
}

export function drawCollage(g, detail) {
  const points = collagePoints(detail);
  if (!points.length) {
    g.pen.text("No vectors of this head were kept.", g.width / 2, g.height / 2, { size: 12.5, anchor: "middle", fill: g.theme.muted });
    return;
  }
  const { blue, red } = g.app.data.about.colours;
  const frame = { left: 46, right: g.width - 12, top: 24, bottom: g.height - 34 };
  const [across, up] = ["x", "y"].map((name) => axisOf(extent(points.map((p) => p[name])), null, { parts: 5 }));
  const x = scale([across.low, across.high], [frame.left + 6, frame.right - 6]);
  const y = scale([up.low, up.high], [frame.bottom - 4, frame.top + 4]);
  valueAxis(g, frame, y, up.ticks, up.text);
  for (const tick of across.ticks) g.pen.text(across.text(tick), x(tick), frame.bottom + 15, { size: LABEL, anchor: "middle", fill: g.theme.muted });
  g.pen.text("PC0 →", frame.right, frame.bottom + 29, { size: LABEL, anchor: "end", fill: g.theme.ink });
  g.pen.text("PC1 ↑", 2, frame.top - 4, { size: LABEL, fill: g.theme.ink });
  const ends = extent(points.map((p) => p.position));
  const strength = (position) => FAINTEST + (1 - FAINTEST) * (ends[1] > ends[0] ? (position - ends[0]) / (ends[1] - ends[0]) : 1);
  for (const p of points) g.pen.mark(p.kind === "q" ? "circle" : "square", x(p.x), y(p.y), 3, { fill: p.kind === "q" ? blue : red, alpha: strength(p.position) });
  key(g, { ...frame, left: frame.left + 20 }, ends);
}
