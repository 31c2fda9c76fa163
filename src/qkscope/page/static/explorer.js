// The portrait that moves: slider, trails, hovering, clicking, brushing, and arrow keys from head to head.

import { View } from "./view.js";
import { button, select } from "./dom.js";
import { markWords } from "./colours.js";
import { correlation, plural, whole } from "./format.js";
import { dotRadius, drawDots, drawFrame, drawTrails, portraitFrame } from "./portrait.js";

const NEAR = 14; // pixels within which a pointer means a dot
const DRAG = 5; // pixels after which a click is a brush

// What a reader wants to know about a head at a checkpoint.
export function headLines(app, head, checkpoint) {
  const { data, store } = app;
  const { component, reading } = store.state;
  const at = data.at(checkpoint, component, head);
  const source = data.readings[reading];
  const code = source.category[at];
  if (code === data.absent) return [data.name(head), `not measured at ${data.checkpoints[checkpoint].label}`];
  const kind = [data.kind("rotary", checkpoint, head), data.kind("attention", checkpoint, head)].filter(Boolean).join(", ");
  return [
    `Layer ${data.layers[head]}, head ${data.heads[head]}`,
    `${data.categories[code].name}${kind ? ` (${kind})` : ""}`,
    `r_q ${correlation(source.r_q[at], 4)}`,
    `r_k ${correlation(source.r_k[at], 4)}`,
    `explained variance ${correlation(source.explained_variance[at], 4)}`,
    `n ${whole(source.n_q[at])} queries, ${whole(source.n_k[at])} keys`,
  ];
}

function nearest(motion, frame, mask, x, y) {
  let best = null;
  let distance = NEAR ** 2;
  for (let h = 0; h < mask.length; h += 1) {
    const away = mask[h] ? (frame.x(motion.x[h]) - x) ** 2 + (frame.y(motion.y[h]) - y) ** 2 : Infinity;
    if (away < distance) [best, distance] = [h, away];
  }
  return best;
}

// The next head in a direction: near and not far off the line; the order of heads where nothing lies there.
function neighbour(motion, mask, from, [dx, dy]) {
  let best = from;
  let least = Infinity;
  for (let h = 0; h < mask.length; h += 1) {
    if (!mask[h] || h === from || !Number.isFinite(motion.x[h] + motion.y[h])) continue;
    const [across, up] = [2 * (motion.x[h] - motion.x[from]), motion.y[h] - motion.y[from]];
    const along = across * dx + up * dy;
    const aside = Math.abs(across * dy) + Math.abs(up * dx);
    const cost = along + 2 * aside;
    if (along > 1e-9 && cost < least) [best, least] = [h, cost];
  }
  return best;
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

function draw(g) {
  const { app } = g;
  const { data, store, selection, motion } = app;
  const { checkpoint } = store.state;
  const frame = portraitFrame(app, { x: 0, y: 0, w: g.width, h: g.height });
  const mask = selection.mask(checkpoint);
  const scene = { mask, x: motion.x, y: motion.y, checkpoint, radius: dotRadius(data.nHeads, g.width) };
  drawFrame(g, frame);
  drawTrails(g, frame, scene);
  drawDots(g, frame, scene);
  const box = app.dragging ?? (store.state.brush?.kind === "box" ? store.state.brush : null);
  if (box) {
    const [x0, x1] = box.r_q.map(frame.x);
    const [y0, y1] = box.r_k.map(frame.y);
    g.pen.rect(x0, y1, x1 - x0, y0 - y1, { fill: g.theme.ink, alpha: 0.06 });
    g.pen.rect(x0, y1, x1 - x0, y0 - y1, { stroke: g.theme.ink, width: 1, dash: [4, 3] });
  }
}

function attachPointer(view) {
  const { app, surface } = view;
  const frameNow = () => portraitFrame(app, { x: 0, y: 0, w: view.width, h: view.spec.height(view.width, app) });
  const maskNow = () => app.selection.mask(app.store.state.checkpoint);
  const clamp = (value) => Math.max(-1.06, Math.min(1.06, value));
  let start = null;
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") start = view.place(event);
  });
  surface.addEventListener("pointermove", (event) => {
    const [x, y] = view.place(event);
    const frame = frameNow();
    if (start && Math.hypot(x - start[0], y - start[1]) > DRAG) {
      surface.setPointerCapture(event.pointerId);
      const sorted = (a, b, to) => [a, b].map((value) => clamp(to(value))).sort((one, other) => one - other);
      app.dragging = { r_q: sorted(start[0], x, frame.toQ), r_k: sorted(start[1], y, frame.toK) };
      app.tooltip.hide();
      view.refresh();
      return;
    }
    const hover = nearest(app.motion, frame, maskNow(), x, y);
    surface.classList.toggle("clickable", hover !== null);
    app.store.set({ hover });
    if (hover === null) app.tooltip.hide();
    else app.tooltip.show(headLines(app, hover, app.store.state.checkpoint), event.clientX, event.clientY);
  });
  surface.addEventListener("pointerup", (event) => {
    const { checkpoint, component, reading } = app.store.state;
    if (app.dragging) {
      app.store.set({ brush: { kind: "box", checkpoint, component, reading, ...app.dragging } });
      app.dragging = null;
      app.announce(`Box: ${app.selection.title()}`);
    } else if (event.button === 0) {
      const [x, y] = view.place(event);
      const head = nearest(app.motion, frameNow(), maskNow(), x, y);
      if (head === null && app.store.state.brush) app.store.set({ brush: null });
      else app.store.set({ head });
    }
    start = null;
  });
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
}

function attachKeys(view) {
  const { app, surface } = view;
  surface.tabIndex = 0;
  surface.setAttribute("role", "application");
  surface.setAttribute("aria-roledescription", "scatter plot");
  surface.addEventListener("keydown", (event) => {
    const { state } = app.store;
    const mask = app.selection.mask(state.checkpoint);
    const current = state.hover ?? state.head ?? mask.indexOf(1);
    if (current < 0) return;
    const direction = ARROWS[event.key];
    if (direction) {
      const hover = state.hover === null && state.head === null ? current : neighbour(app.motion, mask, current, direction);
      app.store.set({ hover });
      app.announce(headLines(app, hover, state.checkpoint).join(", "));
    } else if (event.key === "Enter" || event.key === " ") app.store.set({ head: current });
    else if (event.key === "Escape") app.store.set({ head: null, hover: null, brush: null });
    else return;
    event.preventDefault();
  });
  surface.addEventListener("blur", () => app.store.set({ hover: null }));
}

function table(app) {
  return app.headTable(app.store.state.checkpoint, true);
}

export function explorer(app) {
  const { store, data } = app;
  const trails = select("Trails", [["0", "no trails"], ["3", "trails: 3 checkpoints"], ["all", "trails: all"]], (trail) => store.set({ trail }));
  trails.value = store.state.trail;
  const clear = button("Clear box", () => store.set({ brush: null }), { class: "quiet" });
  const view = new View(app, {
    id: "portrait",
    title: "Phase portrait",
    about: "One mark per head. Click a head to follow it, drag a box to keep its heads in every view.",
    surface: "canvas",
    uses: ["checkpoint", "component", "reading", "layers", "hidden", "brush", "head", "hover", "trail", "theme"],
    card: "rq_rk_scatter_grid",
    options: [!data.oneRun || data.checkpoints.length < 2 ? null : trails, clear].filter(Boolean),
    height: (width) => Math.round(Math.min(620, Math.max(320, width * 0.92))),
    draw,
    table,
    attach: (each) => {
      attachPointer(each);
      attachKeys(each);
    },
    label: () => {
      const s = app.summaries.at(store.state.checkpoint);
      const shares = data.categories.map((c, i) => `${c.name} ${s.counts[i]}`).join(", ");
      return `Phase portrait at ${data.checkpoints[store.state.checkpoint].label}: ${plural(s.heads, "head")}; ${shares}. Arrow keys move between heads, Enter selects, Escape clears.`;
    },
    note: () => {
      const { checkpoint, component, reading } = store.state;
      const { category } = data.readings[reading];
      const start = data.row(checkpoint, component);
      const missing = category.subarray(start, start + data.nHeads).filter((code) => code === data.undefinedCode).length;
      return `${markWords(app.layerKinds)}${missing ? `${plural(missing, "head")} without a defined correlation cannot be placed.` : ""}`;
    },
  });
  store.subscribe((changed) => changed.has("brush") && (clear.hidden = !store.state.brush));
  clear.hidden = true;
  app.motion.onFrame = () => {
    if (view.seen && view.width >= 40) view.paint();
    else view.stale = true;
  };
  return view;
}
