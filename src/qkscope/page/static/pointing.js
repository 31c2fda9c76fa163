// Meaning a head, with a pointer or with keys: the same in every view whose marks are heads.

import { button } from "./dom.js";

const NEAR = 14; // pixels within which a pointer means a mark
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }; // on the screen

// The head whose mark a pointer means; `place(h)` says where a head's mark is, in pixels.
export function nearest(place, mask, [x, y]) {
  let best = null;
  let distance = NEAR ** 2;
  for (let h = 0; h < mask.length; h += 1) {
    if (!mask[h]) continue;
    const [across, down] = place(h);
    const away = (across - x) ** 2 + (down - y) ** 2;
    if (away < distance) [best, distance] = [h, away];
  }
  return best;
}

// The next head in a direction: near and not far off the line; the same head where nothing lies there.
function neighbour(place, heads, from, [dx, dy]) {
  const [x, y] = place(from);
  let best = from;
  let least = Infinity;
  for (const h of heads) {
    const [across, down] = [place(h)[0] - x, place(h)[1] - y];
    const along = across * dx + down * dy;
    const cost = along + 2 * (Math.abs(across * dy) + Math.abs(down * dx));
    if (along > 1e-6 && cost < least) [best, least] = [h, cost];
  }
  return best;
}

// The pointer is over a head, or over none: every view marks it, the tooltip says `lines(app, head, checkpoint)`.
export function point(view, head, event, lines) {
  const { app, surface } = view;
  surface.classList.toggle("clickable", head !== null);
  app.store.set({ hover: head });
  if (head === null) app.tooltip.hide();
  else app.tooltip.show(lines(app, head, app.store.state.checkpoint), event.clientX, event.clientY);
}

// A head is chosen; empty space chooses nothing and drops nothing. Called at a click, not before it: on a phone the click
// that ends a tap would fall on the drawer that has opened under the finger.
export function choose(view, head) {
  if (head !== null) view.app.store.set({ head });
}

// A button for fingers: the next drag draws a box instead of scrolling the page.
export function boxButton(view) {
  const node = button("Box by finger", () => {
    view.boxing = !view.boxing;
    view.surface.style.touchAction = view.boxing ? "none" : "";
    node.setAttribute("aria-pressed", String(view.boxing));
    if (view.boxing) view.app.announce("Drag over heads to select them", true);
  }, { class: "quiet touch-only", "aria-pressed": "false" });
  view.stopBoxing = () => view.boxing && node.click();
  return node;
}

// Arrows go from head to head, Enter chooses, Escape clears. `first()` is where to begin, undefined where there is
// nothing; `next(head, direction, fresh)` is the head to go to, `fresh` when none was marked before.
export function attachKeys(view, { what, first, next, lines }) {
  const { app, surface } = view;
  const { store } = app;
  surface.tabIndex = 0;
  surface.setAttribute("role", "application");
  surface.setAttribute("aria-roledescription", what);
  surface.addEventListener("keydown", (event) => {
    const marked = store.state.hover ?? store.state.head;
    const current = marked ?? first();
    if (current === undefined) return;
    if (ARROWS[event.key]) {
      const hover = next(current, ARROWS[event.key], marked === null);
      store.set({ hover });
      app.announce(lines(app, hover, store.state.checkpoint).join(", "));
    } else if (event.key === "Enter" || event.key === " ") {
      if (store.state.head === current) document.getElementById("title-head").focus(); // once more: into its drawer
      else store.set({ head: current });
    }
    else if (event.key === "Escape") store.set({ head: null, hover: null, brush: null });
    else return;
    event.preventDefault();
  });
  surface.addEventListener("blur", () => store.set({ hover: null }));
}

// The same where heads are marks in a plane: `placesOf(view)(h)` is where a head's mark is now, NaN where it has none.
export function attachMarkKeys(view, what, placesOf, lines) {
  const heads = (place) => {
    const mask = view.app.selection.mask(view.app.store.state.checkpoint);
    return Array.from(mask.keys()).filter((h) => mask[h] && place(h).every(Number.isFinite));
  };
  const next = (from, direction, fresh) => {
    const place = placesOf(view);
    const shown = heads(place);
    const lost = fresh || !place(from).every(Number.isFinite);
    return lost ? (shown[0] ?? from) : neighbour(place, shown, from, direction);
  };
  attachKeys(view, { what, first: () => heads(placesOf(view))[0], next, lines });
}
