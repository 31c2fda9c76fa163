// A closer look at a part of the portrait: buttons, keys (+, − and 0) and Ctrl with the wheel.

import { button, element } from "./dom.js";
import { wholeRange } from "./portrait.js";

const CLOSER = 0.6; // of what is seen, at each step
const CLOSEST = 0.02; // no narrower than this

function middle([low, high]) {
  return (low + high) / 2;
}

// The part of what can be seen of this width around a place; null for all of it.
function around(app, { q, k }, share) {
  const whole = wholeRange(app);
  const span = (name) => Math.max(CLOSEST, share * (whole[name][1] - whole[name][0]));
  const fitted = (name, centre) => {
    const [from, to] = whole[name];
    const low = Math.min(Math.max(from, centre - span(name) / 2), to - span(name));
    return [low, low + span(name)];
  };
  return share > 0.999 ? null : { r_q: fitted("r_q", q), r_k: fitted("r_k", k) };
}

function shareOf(app) {
  const { zoom } = app.store.state;
  const whole = wholeRange(app);
  return zoom ? (zoom.r_q[1] - zoom.r_q[0]) / (whole.r_q[1] - whole.r_q[0]) : 1;
}

// Where a reader looks: at the head that is marked or chosen, at the box, else at the middle of what is seen.
function centre(app) {
  const { hover, head, brush, zoom } = app.store.state;
  const marked = hover ?? head;
  if (marked !== null && Number.isFinite(app.motion.x[marked] + app.motion.y[marked])) return { q: app.motion.x[marked], k: app.motion.y[marked] };
  const range = brush?.kind === "box" && !zoom ? brush : (zoom ?? wholeRange(app));
  return { q: middle(range.r_q), k: middle(range.r_k) };
}

function say(app) {
  app.announce(app.store.state.zoom ? `Zoomed: ${Math.round(100 * shareOf(app))}% of the width of the portrait` : "The whole portrait");
}

export function zoomBy(app, factor, place = centre(app)) {
  app.store.set({ zoom: around(app, place, shareOf(app) * factor) });
  say(app);
}

export function zoomButtons(app) {
  const { store } = app;
  const out = button("−", () => zoomBy(app, 1 / CLOSER), { class: "tool", "aria-label": "Zoom out of the portrait" });
  const closer = button("+", () => zoomBy(app, CLOSER), { class: "tool", "aria-label": "Zoom into the portrait" });
  const whole = button("whole", () => {
    store.set({ zoom: null });
    say(app);
    closer.focus({ preventScroll: true }); // the button is about to go
  }, { class: "quiet", "aria-label": "Show the whole portrait" });
  const update = () => {
    out.disabled = !store.state.zoom;
    whole.hidden = !store.state.zoom;
  };
  store.subscribe((changed) => changed.has("zoom") && update());
  update();
  return element("span", { class: "zoom", role: "group", "aria-label": "Zoom" }, "zoom ", out, closer, whole);
}

// Keys and wheel on the portrait; a head that arrow keys reach outside what is seen comes into the middle.
export function attachZoom(view, frameOf) {
  const { app, surface } = view;
  const { store } = app;
  surface.addEventListener("keydown", (event) => {
    const factor = { "+": CLOSER, "=": CLOSER, "-": 1 / CLOSER }[event.key];
    if (factor && !event.ctrlKey && !event.metaKey) zoomBy(app, factor);
    else if (event.key === "0" && store.state.zoom && !event.ctrlKey) store.set({ zoom: null });
    else return;
    event.preventDefault();
  });
  surface.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a wheel alone scrolls the page
    event.preventDefault();
    const [frame, [x, y]] = [frameOf(view), view.place(event)];
    zoomBy(app, event.deltaY < 0 ? CLOSER : 1 / CLOSER, { q: frame.toQ(x), k: frame.toK(y) });
  }, { passive: false });
  store.subscribe((changed) => {
    const { hover, zoom } = store.state;
    if (!changed.has("hover") || hover === null || !zoom) return;
    const [q, k] = [app.motion.x[hover], app.motion.y[hover]];
    const seen = q >= zoom.r_q[0] && q <= zoom.r_q[1] && k >= zoom.r_k[0] && k <= zoom.r_k[1];
    if (!seen && document.activeElement === surface && Number.isFinite(q + k)) store.set({ zoom: around(app, { q, k }, shareOf(app)) });
  });
}
