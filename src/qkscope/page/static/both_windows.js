// The two context lengths: what they are called, which of them a view shows, and the same chart of a head at both, side
// by side or one below the other.

import { ShiftedPen } from "./pen.js";
import { whole } from "./format.js";

const SIDE_BY_SIDE = 560; // pixels
const TITLE = 18;

export const WINDOW_NAMES = { own: "native context length", common: "common window" };
export const WINDOW_FILES = { own: "native-length", common: "common-window", both: "both-lengths" };

// What a window is, in words: "common window of 128 tokens".
export function windowWords(data, window, checkpoint) {
  const common = `common window of ${whole(data.window("common", checkpoint))} tokens`;
  return { own: WINDOW_NAMES.own, common, both: `${WINDOW_NAMES.own} and ${common}` }[window];
}

// The window of what a view shows: "own", "common", "both", or null where the view is about neither.
export function shownWindow({ data, store }, { uses, window }) {
  if (window) return window();
  const { choice, both } = store.state;
  if (both && data.choices.common && uses.includes("both")) return "both";
  return uses.includes("choice") ? choice : null;
}

// The windows at which a detail is shown: both where the reader asked for both and the checkpoint has both.
export function shownWindows(app, table, checkpoint) {
  const { choice, both } = app.store.state;
  const kept = app.data.about.data.detail.tables[table] ?? {};
  return both && ["own", "common"].every((each) => kept[each]?.includes(checkpoint)) ? ["own", "common"] : [choice];
}

// How high a drawing must be whose charts have this height each.
export function stackedHeight(windows, width, height) {
  return windows.length > 1 ? (width >= SIDE_BY_SIDE ? 1 : windows.length) * (height + TITLE) : height;
}

// `rows(window)` is what `draw(g, rows)` shows; hits are where the charts are.
export function drawWindows(g, windows, checkpoint, rows, draw) {
  if (windows.length === 1) return draw(g, rows(windows[0])) ?? [];
  const columns = g.width >= SIDE_BY_SIDE ? windows.length : 1;
  const [wide, tall] = [g.width / columns, g.height / (windows.length / columns)];
  return windows.flatMap((each, i) => {
    const title = `${WINDOW_NAMES[each]}, ${whole(g.app.data.window(each, checkpoint))} tokens`;
    const [left, top] = [(i % columns) * wide, Math.floor(i / columns) * tall + TITLE];
    g.pen.text(title, left + 4, top - 5, { size: 12, weight: 650, fill: g.theme.ink });
    const hits = draw({ ...g, pen: new ShiftedPen(g.pen, left, top), width: wide, height: tall - TITLE }, rows(each)) ?? [];
    return hits.map((hit) => ({ ...hit, x: hit.x + left, y: hit.y + top, lines: [title, ...hit.lines] }));
  });
}
