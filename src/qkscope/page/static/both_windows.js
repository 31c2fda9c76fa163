// The same chart of a head at its own context and at the common window, side by side or one below the other.

import { ShiftedPen } from "./pen.js";
import { whole } from "./format.js";

const SIDE_BY_SIDE = 560; // pixels
const TITLE = 18;

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
    const title = `${each === "own" ? "own context" : "common window"}, ${whole(g.app.data.window(each, checkpoint))} tokens`;
    const [left, top] = [(i % columns) * wide, Math.floor(i / columns) * tall + TITLE];
    g.pen.text(title, left + 4, top - 5, { size: 12, weight: 650, fill: g.theme.ink });
    const hits = draw({ ...g, pen: new ShiftedPen(g.pen, left, top), width: wide, height: tall - TITLE }, rows(each)) ?? [];
    return hits.map((hit) => ({ ...hit, x: hit.x + left, y: hit.y + top, lines: [title, ...hit.lines] }));
  });
}
