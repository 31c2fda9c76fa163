// What a step did to a mean: window, RoPE base, weights and what none of them explains, one after the other.

import { View } from "./view.js";
import { LABEL, scale, valueAxis } from "./axis.js";
import { axisOf, estimate, extent } from "./numbers.js";
import { difference } from "./format.js";
import { partColours } from "./colours.js";
import { select } from "./dom.js";
import { textWidth } from "./pen.js";

const PARTS = ["change", "window", "RoPE base", "weights", "unexplained", "window + base", "weights (with window + base)"];
// Places in PARTS of the causes that are shown, and of their colours. Python decides whether window and base are one.
const SEPARATE = [[1, 0], [2, 1], [3, 2], [4, 3]];
const JOINT = [[5, 0], [6, 2], [4, 3]];
const SAID = { changed: "", unchanged: ", not significant", unknown: ", error not known" };

const nameOf = (place) => (place === 6 ? PARTS[3] : PARTS[place]);
const shownParts = (row) => (row.joint ? JOINT : SEPARATE);
const QUANTITIES = { r_q: "mean r_q", r_k: "mean r_k", position_dominated: "share position-dominated" };

// The step that is shown: the one to the checkpoint on the slider, or from the first to the last.
function shownStep(app) {
  const { state } = app.store;
  if (state.splitStep) return state.splitStep;
  const rows = app.data.about.split;
  const to = state.checkpoint;
  return rows.some((row) => row.to === to && row.from === to - 1) && to < app.data.checkpoints.length - 1 ? [to - 1, to] : [0, app.data.checkpoints.length - 1];
}

function rowsOf(app) {
  const [from, to] = shownStep(app);
  const { choice } = app.store.state;
  const all = app.data.about.split.filter((row) => row.windows === choice && row.from === from && row.to === to && row.quantity !== "position_dominated");
  const rotary = all.filter((row) => row.of === "rotary"); // layers without rotation have nothing to split
  return rotary.length ? rotary : all.filter((row) => row.of === "all");
}

// The name of a part in so many pixels: smaller letters first, then fewer.
function shortName(name, room) {
  const words = [name, name.replace("RoPE ", ""), name.replace("unexplained", "rest")];
  const choices = words.flatMap((text) => [LABEL, 10, 9].map((size) => [text, size]));
  return choices.find(([text, size]) => textWidth(text, size) <= room) ?? choices.at(-1);
}

function drawOne(g, frame, row) {
  const { theme, pen } = g;
  const parts = partColours(g);
  const values = row.parts.map((value) => value ?? NaN);
  const errors = row.errors.map((value) => value ?? NaN);
  let sum = row.before;
  const bars = shownParts(row).map(([i, colour]) => ({ name: nameOf(i), from: sum, to: (sum += values[i]), error: errors[i], value: values[i], outcome: row.outcomes[i], fill: parts[colour] }));
  const axis = axisOf(extent([row.before, row.after, ...bars.flatMap((b) => [b.from, b.to, b.to - (b.error || 0), b.to + (b.error || 0)])]), null, { zero: true, parts: 4 });
  const y = scale([axis.low, axis.high], [frame.bottom, frame.top]);
  valueAxis(g, frame, y, axis.ticks, axis.text);
  const step = (frame.right - frame.left) / (bars.length + 2);
  const ends = [[0, row.before, "before"], [bars.length + 1, row.after, "after"]];
  for (const [i, value, name] of ends) {
    pen.rect(frame.left + i * step + 4, Math.min(y(value), y(0)), step - 8, Math.abs(y(value) - y(0)), { fill: theme.line, alpha: 0.6 });
    pen.text(name, frame.left + (i + 0.5) * step, frame.bottom + 15, { size: LABEL, anchor: "middle", fill: theme.ink });
  }
  const hits = bars.map((bar, i) => {
    const left = frame.left + (i + 1) * step;
    pen.rect(left + 4, Math.min(y(bar.from), y(bar.to)), step - 8, Math.max(1, Math.abs(y(bar.to) - y(bar.from))), { fill: bar.fill, alpha: 0.85 });
    if (Number.isFinite(bar.error)) pen.line([[left + step / 2, y(bar.to - bar.error)], [left + step / 2, y(bar.to + bar.error)]], { stroke: theme.ink, width: 1.4 });
    pen.line([[left + step - 4, y(bar.to)], [left + step + 4, y(bar.to)]], { stroke: theme.line, width: 1 });
    const [label, size] = shortName(bar.name, step - 3);
    pen.text(label, left + step / 2, frame.bottom + 15, { size, anchor: "middle", fill: theme.ink });
    pen.text(difference(bar.value), left + step / 2, Math.min(y(bar.from), y(bar.to)) - 5, { size: 11, anchor: "middle", fill: theme.ink });
    return { x: left, y: frame.top, w: step, h: frame.bottom - frame.top, lines: [bar.name, `${estimate(bar.value, bar.error, 3, { sign: true })}${SAID[bar.outcome]}`] };
  });
  pen.text(`${QUANTITIES[row.quantity]}${row.of === "all" ? "" : ` (${row.of === "nope" ? "NoPE" : row.of}, ${row.heads} heads)`}`, frame.left, frame.top - 24, { size: 12, weight: 650, fill: theme.ink });
  return hits;
}

function layout(width, count) {
  const columns = width >= 760 ? Math.min(2, count) : 1;
  return { columns, rows: Math.ceil(count / columns) };
}

function draw(g) {
  const rows = rowsOf(g.app);
  if (!rows.length) {
    g.pen.text("Not split at this window.", g.width / 2, g.height / 2, { size: 13, anchor: "middle", fill: g.theme.muted });
    return [];
  }
  const { columns, rows: lines } = layout(g.width, rows.length);
  const [wide, tall] = [g.width / columns, g.height / lines];
  return rows.flatMap((row, i) => {
    const [column, line] = [i % columns, Math.floor(i / columns)];
    return drawOne(g, { left: column * wide + 44, right: (column + 1) * wide - 10, top: line * tall + 44, bottom: (line + 1) * tall - 28 }, row);
  });
}

export function waterfallView(app) {
  const { data, store } = app;
  const { split } = data.about;
  if (!split.length) return null;
  const steps = [...new Set(split.map((row) => `${row.from} ${row.to}`))].map((key) => key.split(" ").map(Number));
  const picker = select("Step", [["slider", "step to the slider"], ...steps.map(([a, b]) => [`${a} ${b}`, `${data.checkpoints[a].label} → ${data.checkpoints[b].label}`])], (value) => store.set({ splitStep: value === "slider" ? null : value.split(" ").map(Number) }));
  const update = () => (picker.value = store.state.splitStep?.join(" ") ?? "slider");
  store.subscribe((changed) => changed.has("splitStep") && update());
  update();
  const words = () => shownStep(app).map((c) => data.checkpoints[c].label).join(" → ");
  return new View(app, {
    id: "waterfall", title: "What made the change: window, RoPE base or weights?", surface: "svg", card: "causes", allHeads: true, options: [picker],
    about: "From before to after, one cause at a time, averaged over their orders. Window and base are one cause where the order matters. Bars: ± 1 standard error over documents.",
    uses: ["checkpoint", "choice", "splitStep", "theme"],
    height: (width) => 268 * layout(width, Math.max(1, rowsOf(app).length)).rows,
    draw,
    table: () => ({ columns: ["windows", "from", "to", "heads_of", "quantity", "before", "after", ...PARTS, ...PARTS.map((name) => `${name}_se`)], rows: split.map((row) => [row.windows, data.checkpoints[row.from].name, data.checkpoints[row.to].name, row.of, row.quantity, row.before, row.after, ...row.parts, ...row.errors]) }),
    note: () => `${words()}. All rotary heads; filters do not change it. The CSV has the other kinds and the share of position-dominated heads.`,
    label: () => `Change from ${words()} by cause. ${rowsOf(app).map((row) => `${QUANTITIES[row.quantity]} of ${row.of} heads: ${[[0], ...shownParts(row)].map(([i]) => `${nameOf(i)} ${difference(row.parts[i] ?? NaN, 3)}`).join(", ")}`).join("; ")}`,
  });
}
