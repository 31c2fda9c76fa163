// What the context length alone does: the same weights, measured over shorter prefixes of the same documents.

import { View } from "./view.js";
import { correlation, percent, whole } from "./format.js";
import { drawErrors, scale, valueAxis } from "./axis.js";
import { estimate, shareEstimate } from "./numbers.js";
import { segmented } from "./dom.js";
import { textWidth } from "./pen.js";

const MEASURES = [
  ["r_q", "mean r_q", (s) => s.r_q.mean],
  ["r_k", "mean r_k", (s) => s.r_k.mean],
  ["position-dominated", "position-dominated", (s) => s.shares[0]],
  ["discordant", "discordant", (s) => s.discordant],
];

function measureOf(app) {
  return MEASURES.find(([key]) => key === app.store.state.windowMeasure);
}

// Whether a window has enough tokens and documents: 1, 0, or NaN where that is not known.
function enough(app, entry) {
  return app.data.windowValues.enough?.[entry.row] ?? NaN;
}

// One line per checkpoint. A window that is too short is drawn with its error or not at all.
function lines(app) {
  const [key, , value] = measureOf(app);
  const point = (entry) => ({ ...entry, value: value(app.summaries.window(entry)), error: app.summaries.windowError(entry, key), enough: enough(app, entry) });
  return app.selection.checkpoints().map((c) => ({
    checkpoint: c,
    points: app.data.windows.filter((entry) => entry.checkpoint === c).map(point).filter((p) => p.enough !== 0 || Number.isFinite(p.error)),
  }));
}

// What is said below the chart about windows that are too short.
function note(app) {
  const { data } = app;
  const { tokens, documents } = data.about.enough;
  const known = data.windows.filter((entry) => Number.isFinite(enough(app, entry)));
  if (!known.length) return "Token and document counts per window are not recorded.";
  const rule = `at least ${whole(tokens)} tokens per head and ${documents} documents`;
  const first = data.checkpoints.map((_, c) => Math.min(...known.filter((entry) => entry.checkpoint === c && enough(app, entry) === 1).map((entry) => entry.size))).filter(Number.isFinite);
  const said = first.length ? `Smallest window with ${rule}: ${[...new Set([Math.min(...first), Math.max(...first)])].map(whole).join(" to ")} tokens.` : `No window has ${rule}.`;
  const short = known.some((entry) => enough(app, entry) === 0);
  const shorter = app.selection.allHeads && data.hasErrors ? "Shorter windows are drawn with their errors." : "Shorter windows have no errors here and are left out.";
  return short ? `${said} ${shorter}` : said;
}

function draw(g) {
  const { pen, theme, app } = g;
  const { data, store } = app;
  const all = lines(app);
  const sizes = [...new Set(data.windows.map((entry) => entry.size))].sort((a, b) => a - b);
  const shares = !["r_q", "r_k"].includes(store.state.windowMeasure);
  const frame = { left: 46, right: g.width - 70, top: 14, bottom: g.height - 42 };
  const values = all.flatMap((line) => line.points.map((p) => p.value)).filter(Number.isFinite);
  const low = Math.min(0, Math.floor(Math.min(0, ...values) * 5) / 5);
  const y = scale([low, Math.max(0.2, Math.ceil(Math.max(0, ...values) * 5) / 5)], [frame.bottom, frame.top]);
  const ends = [Math.log2(sizes[0]), Math.log2(sizes[sizes.length - 1])];
  const x = ends[0] === ends[1] ? () => (frame.left + frame.right) / 2 : (size) => scale(ends, [frame.left + 12, frame.right - 8])(Math.log2(size));
  const ticks = Array.from({ length: 11 }, (_, i) => Math.round((i - 5) * 2) / 10).filter((t) => y(t) <= frame.bottom + 0.5 && y(t) >= frame.top - 0.5);
  valueAxis(g, frame, y, ticks, (v) => (shares ? percent(v) : correlation(v, 1)));
  let last = -Infinity;
  for (const size of sizes) {
    const text = whole(size);
    if (x(size) - textWidth(text, 11) / 2 < last + 8) continue;
    pen.text(text, x(size), frame.bottom + 16, { size: 11, anchor: "middle", fill: theme.muted });
    last = x(size) + textWidth(text, 11) / 2;
  }
  pen.text(g.width < 460 ? "window (tokens, log scale)" : "window: leading tokens of each document (log scale)", frame.right, frame.bottom + 34, { size: 12, anchor: "end", fill: theme.ink });
  const hits = [];
  const ordered = [...all.filter((l) => l.checkpoint !== store.state.checkpoint), ...all.filter((l) => l.checkpoint === store.state.checkpoint)];
  for (const { checkpoint, points } of ordered) {
    const current = checkpoint === store.state.checkpoint;
    const known = points.filter((p) => Number.isFinite(p.value));
    const stroke = current ? theme.ink : theme.line;
    if (known.length > 1) pen.line(known.map((p) => [x(p.size), y(p.value)]), { stroke, width: current ? 2.6 : 1.1, alpha: current ? 1 : 0.7 });
    for (const p of known) {
      const own = p.size === data.window("own", checkpoint);
      const { error } = p;
      pen.mark("circle", x(p.size), y(p.value), current ? 4 : 2.6, { fill: own ? stroke : theme.paper, stroke, width: 1.2 });
      drawErrors(g, () => x(p.size), y, [p.value], [error], [-1, 1]);
      hits.push({ x: x(p.size) - 6, y: y(p.value) - 6, w: 12, h: 12, lines: [data.checkpoints[checkpoint].label, `window ${whole(p.size)}${own ? " (native length)" : ""}${p.enough === 0 ? ", few tokens or documents" : ""}`, shares ? shareEstimate(p.value, error) : estimate(p.value, error, 3)], click: () => store.set({ checkpoint }) });
    }
    if (current && known.length) {
      const end = known[known.length - 1];
      pen.text(data.checkpoints[checkpoint].label.slice(0, 10), Math.min(x(end.size) + 9, g.width - 66), y(end.value) + 4, { size: 11.5, weight: 650, fill: theme.ink });
    }
  }
  return hits;
}

function table(app) {
  const { data, summaries } = app;
  const columns = ["model", "window", "heads", "r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant", "position_dominated", "enough", "r_q_se", "r_k_se", "discordant_se", "position_dominated_se"];
  const shown = new Set(app.selection.checkpoints());
  const rows = data.windows.filter((entry) => shown.has(entry.checkpoint)).map((entry) => {
    const s = summaries.window(entry);
    return [data.checkpoints[entry.checkpoint].name, entry.size, s.heads, s.r_q.mean, s.r_k.mean, s.r_k_abs.mean, s.explained_variance.mean, s.concordant, s.discordant, s.shares[0], enough(app, entry), ...["r_q", "r_k", "discordant", "position-dominated"].map((name) => summaries.windowError(entry, name))];
  });
  return { columns, rows };
}

export function windowView(app) {
  if (!app.data.windows.length) return null;
  const control = segmented("Measure", MEASURES.map(([key, text]) => [key, text]), (windowMeasure) => app.store.set({ windowMeasure }));
  control.update(app.store.state.windowMeasure);
  app.store.subscribe((changed) => changed.has("windowMeasure") && control.update(app.store.state.windowMeasure));
  return new View(app, {
    id: "windows", title: "Position signal by context length", surface: "svg", window: () => null, card: "context_length", options: [control.node],
    about: `Along a line the weights stay the same; only the number of leading tokens changes. PC0; filled mark: native context length.`,
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "windowMeasure", "theme"],
    height: (width) => (width > 500 ? 400 : 340),
    draw,
    table,
    note: () => note(app),
    label: () => `${measureOf(app)[1]} against the window, one line per ${app.data.noun}, ${app.data.checkpoints[app.store.state.checkpoint].label} highlighted.`,
  });
}
