// What a step did to a mean: context length, RoPE base, weights and what none of them explains, one after the other.

import { View } from "./view.js";
import { LABEL, scale, valueAxis } from "./axis.js";
import { axisOf, estimate, extent } from "./numbers.js";
import { difference } from "./format.js";
import { select } from "./dom.js";
import { textWidth } from "./pen.js";

const COLUMNS = ["change", "window", "base", "weights", "unexplained", "window_and_base", "weights_with_window_and_base"];
// Places in COLUMNS of the causes that are shown, their names and colors. Python decides whether length and base are one.
const SEPARATE = [[1, "context length", "window"], [2, "RoPE base", "base"], [3, "weights", "weights"], [4, "unexplained", "unexplained"]];
const JOINT = [[5, "length + base", "window"], [6, "weights", "weights"], [4, "unexplained", "unexplained"]];
const OUTCOMES = { changed: "", unchanged: ", not significant", unknown: ", error not known" };
const QUANTITIES = { r_q: "mean r_q", r_k: "mean r_k", position_dominated: "share position-dominated" };

const shownParts = (row) => (row.joint ? JOINT : SEPARATE);

// The step that is shown: the chosen one, or the one to the checkpoint on the slider, which the first lacks.
function shownStep({ store }) {
  const { splitStep, checkpoint } = store.state;
  return splitStep ?? (checkpoint ? [checkpoint - 1, checkpoint] : null);
}

// The window that is shown: at equal length where the reader asks for both.
function shownWindow({ data, store }) {
  const { both, choice } = store.state;
  return both && data.about.split.some((row) => row.windows === "common") ? "common" : choice;
}

function rowsOf(app) {
  const step = shownStep(app);
  if (!step) return [];
  const [from, to] = step;
  const window = shownWindow(app);
  const all = app.data.about.split.filter((row) => row.windows === window && row.from === from && row.to === to && row.quantity !== "position_dominated");
  const rotary = all.filter((row) => row.of === "rotary"); // layers without rotation have nothing to split
  return rotary.length ? rotary : all.filter((row) => row.of === "all");
}

// The name of a part in so many pixels: smaller letters first, then fewer.
function shortName(name, room) {
  const words = [name, name.replace("context ", "").replace("RoPE ", ""), name.replace("unexplained", "rest")];
  const choices = words.flatMap((text) => [LABEL, 10, 9].map((size) => [text, size]));
  return choices.find(([text, size]) => textWidth(text, size) <= room) ?? choices.at(-1);
}

function drawOne(g, frame, row) {
  const { theme, pen } = g;
  const { causes } = g.app.data.about.colours;
  const values = row.parts.map((value) => value ?? NaN);
  const errors = row.errors.map((value) => value ?? NaN);
  let sum = row.before;
  const bars = shownParts(row).map(([i, name, colour]) => ({ name, from: sum, to: (sum += values[i]), error: errors[i], value: values[i], outcome: row.outcomes[i], fill: causes[colour] }));
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
    pen.rect(left + 4, Math.min(y(bar.from), y(bar.to)), step - 8, Math.max(1, Math.abs(y(bar.to) - y(bar.from))), { fill: bar.fill, stroke: theme.line, width: 0.6 });
    if (Number.isFinite(bar.error)) pen.line([[left + step / 2, y(bar.to - bar.error)], [left + step / 2, y(bar.to + bar.error)]], { stroke: theme.ink, width: 1.4 });
    pen.line([[left + step - 4, y(bar.to)], [left + step + 4, y(bar.to)]], { stroke: theme.line, width: 1 });
    const [label, size] = shortName(bar.name, step - 3);
    pen.text(label, left + step / 2, frame.bottom + 15, { size, anchor: "middle", fill: theme.ink });
    pen.text(difference(bar.value), left + step / 2, Math.min(y(bar.from), y(bar.to)) - 5, { size: 11, anchor: "middle", fill: theme.ink });
    return { x: left, y: frame.top, w: step, h: frame.bottom - frame.top, lines: [bar.name, `${estimate(bar.value, bar.error, 3, { sign: true })}${OUTCOMES[bar.outcome]}`] };
  });
  pen.text(`${QUANTITIES[row.quantity]}${row.of === "all" ? "" : ` (${row.of === "nope" ? "NoPE" : row.of}, ${row.heads} heads)`}`, frame.left, frame.top - 24, { size: 12, weight: 650, fill: theme.ink });
  return hits;
}

function layout(width, count) {
  const columns = width >= 760 ? Math.min(2, count) : 1;
  return { columns, rows: Math.ceil(count / columns) };
}

// Why nothing is drawn.
function missing(app) {
  const { label } = app.data.checkpoints[app.store.state.checkpoint];
  return shownStep(app) ? "No attribution of this step." : `${label} is the first checkpoint: no step leads to it.`;
}

function draw(g) {
  const rows = rowsOf(g.app);
  if (!rows.length) {
    g.pen.text(missing(g.app), g.width / 2, g.height / 2, { size: 13, anchor: "middle", fill: g.theme.muted });
    return [];
  }
  const { columns, rows: lines } = layout(g.width, rows.length);
  const [wide, tall] = [g.width / columns, g.height / lines];
  return rows.flatMap((row, i) => {
    const [column, line] = [i % columns, Math.floor(i / columns)];
    return drawOne(g, { left: column * wide + 44, right: (column + 1) * wide - 10, top: line * tall + 44, bottom: (line + 1) * tall - 28 }, row);
  });
}

// The steps that can be chosen: the one to the slider, and those of the table.
function stepPicker(app) {
  const { data, store } = app;
  const steps = [...new Set(data.about.split.map((row) => `${row.from} ${row.to}`))].map((key) => key.split(" ").map(Number));
  const choices = [["slider", "step to the slider"], ...steps.map(([a, b]) => [`${a} ${b}`, `${data.checkpoints[a].label} → ${data.checkpoints[b].label}`])];
  const picker = select("Step", choices, (value) => store.set({ splitStep: value === "slider" ? null : value.split(" ").map(Number) }));
  const update = () => (picker.value = store.state.splitStep?.join(" ") ?? "slider");
  store.subscribe((changed) => changed.has("splitStep") && update());
  update();
  return picker;
}

export function waterfallView(app) {
  const { data } = app;
  const { split } = data.about;
  if (!split.length) return null;
  const words = () => (shownStep(app) ?? []).map((c) => data.checkpoints[c].label).join(" → ") || data.checkpoints[0].label;
  const spoken = (row) => `${QUANTITIES[row.quantity]} of ${row.of} heads: ${[[0, "change"], ...shownParts(row)].map(([i, name]) => `${name} ${difference(row.parts[i] ?? NaN, 3)}`).join(", ")}`;
  return new View(app, {
    id: "waterfall", title: "Causes of change", surface: "svg", card: "causes", allHeads: true, options: [stepPicker(app)],
    about: "Contribution of each cause. Context length and RoPE base are one cause where their order matters. Bars: ± 1 standard error over documents.",
    uses: ["checkpoint", "choice", "both", "splitStep", "theme"],
    window: () => shownWindow(app),
    subject: words,
    height: (width) => 268 * layout(width, Math.max(1, rowsOf(app).length)).rows,
    draw,
    table: () => ({ columns: ["windows", "from", "to", "heads_of", "quantity", "before", "after", ...COLUMNS, ...COLUMNS.map((name) => `${name}_se`)], rows: split.map((row) => [row.windows, data.checkpoints[row.from].name, data.checkpoints[row.to].name, row.of, row.quantity, row.before, row.after, ...row.parts, ...row.errors]) }),
    note: () => `${words()}. All rotary heads; filters do not apply. The CSV also has the other layer types and the share of position-dominated heads.`,
    label: () => `Causes of change, ${words()}. ${rowsOf(app).map(spoken).join("; ") || missing(app)}`,
  });
}
