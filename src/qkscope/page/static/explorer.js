// The portrait that moves: slider, trails, hovering, clicking, brushing, and arrow keys from head to head.

import { View } from "./view.js";
import { attachMarkKeys, boxButton, choose, nearest, point } from "./pointing.js";
import { button, select } from "./dom.js";
import { markWords } from "./colours.js";
import { estimates, unsure } from "./sure.js";
import { plural, whole } from "./format.js";
import { dotRadius, drawDots, drawFrame, drawTrails, portraitFrame } from "./portrait.js";

const DRAG = 5; // pixels after which a click is a brush

// What a reader wants to know about a head at a checkpoint.
export function headLines(app, head, checkpoint) {
  const { data, store } = app;
  const { component, choice } = store.state;
  const at = data.at(checkpoint, component, head);
  const source = data.choices[choice];
  const code = source.category[at];
  if (code === data.absent) return [data.name(head), `not measured at ${data.checkpoints[checkpoint].label}`];
  const kind = [data.kind("rotary", checkpoint, head), data.kind("attention", checkpoint, head)].filter(Boolean).join(", ");
  return [
    `Layer ${data.layers[head]}, head ${data.heads[head]}`,
    `${data.categoryName(code, component)}${data.runsAgainst(choice, at) ? ", keys against" : ""}${kind ? ` (${kind})` : ""}`,
    ...estimates(data, store.state, checkpoint, head).map(([name, text]) => `${name} ${text}`),
    `n ${whole(source.n_q[at])} queries, ${whole(source.n_k[at])} keys`,
    ...unsure(data, store.state, checkpoint, head),
  ];
}

function draw(g) {
  const { app } = g;
  const { data, store, selection, motion } = app;
  const { checkpoint } = store.state;
  const frame = portraitFrame(app, { x: 0, y: 0, w: g.width, h: g.height });
  const mask = selection.mask(checkpoint);
  const scene = { mask, x: motion.x, y: motion.y, checkpoint, radius: dotRadius(data.nHeads, g.width), errors: !motion.moving };
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

function frameOf(view) {
  return portraitFrame(view.app, { x: 0, y: 0, w: view.width, h: view.spec.height(view.width, view.app) });
}

// Where the mark of each head is now.
function placesOf(view) {
  const [frame, { motion }] = [frameOf(view), view.app];
  return (h) => [frame.x(motion.x[h]), frame.y(motion.y[h])];
}

function attachPointer(view) {
  const { app, surface } = view;
  const headAt = (event) => nearest(placesOf(view), app.selection.mask(app.store.state.checkpoint), view.place(event));
  const clamp = (value) => Math.max(-1.06, Math.min(1.06, value));
  let start = null;
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && (event.pointerType !== "touch" || view.boxing)) start = view.place(event);
  });
  surface.addEventListener("pointermove", (event) => {
    const [x, y] = view.place(event);
    if (start && Math.hypot(x - start[0], y - start[1]) > DRAG) {
      surface.setPointerCapture(event.pointerId);
      const frame = frameOf(view);
      const sorted = (a, b, to) => [a, b].map((value) => clamp(to(value))).sort((one, other) => one - other);
      app.dragging = { r_q: sorted(start[0], x, frame.toQ), r_k: sorted(start[1], y, frame.toK) };
      app.tooltip.hide();
      view.refresh();
      return;
    }
    point(view, headAt(event), event, headLines);
  });
  surface.addEventListener("pointerup", (event) => {
    const { checkpoint, component, choice } = app.store.state;
    if (app.dragging) {
      app.store.set({ brush: { kind: "box", checkpoint, component, choice, ...app.dragging } });
      app.dragging = null;
      view.stopBoxing?.();
      app.announce(`Box: ${app.selection.title()}`);
    } else if (event.button === 0) choose(view, headAt(event));
    start = null;
  });
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
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
    title: "Queries against keys",
    about: "One mark per head. Choose one to open it; drag a box to keep its heads in every view.",
    surface: "canvas",
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "trail", "theme"],
    card: "rq_rk_scatter_grid",
    options: [!data.oneRun || data.checkpoints.length < 2 ? null : trails, clear].filter(Boolean),
    height: (width) => Math.round(Math.min(620, Math.max(320, width * 0.92))),
    draw,
    table,
    attach: (each) => {
      attachPointer(each);
      attachMarkKeys(each, "scatter plot", placesOf, headLines);
    },
    label: () => {
      const s = app.summaries.at(store.state.checkpoint);
      const shares = data.categories.map((c, i) => `${data.categoryName(i, store.state.component)} ${s.counts[i]}`).join(", ");
      return `Portrait at ${data.checkpoints[store.state.checkpoint].label}: ${plural(s.heads, "head")}; ${shares}. Arrow keys move between heads, Enter selects, Escape clears.`;
    },
    note: () => {
      const { checkpoint, component, choice } = store.state;
      const { category } = data.choices[choice];
      const start = data.row(checkpoint, component);
      const missing = category.subarray(start, start + data.nHeads).filter((code) => code === data.undefinedCode).length;
      return `${markWords(app.layerKinds)}${missing ? `${plural(missing, "head")} without a defined correlation cannot be placed.` : ""}`;
    },
  });
  clear.before(boxButton(view));
  store.subscribe((changed) => changed.has("brush") && (clear.hidden = !store.state.brush));
  clear.hidden = !store.state.brush;
  app.motion.onFrame = () => {
    if (view.seen && view.width >= 40) view.paint();
    else view.stale = true;
  };
  return view;
}
