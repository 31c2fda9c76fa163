// The portrait that moves: slider, trails, hovering, clicking, brushing, and arrow keys from head to head.

import { View } from "./view.js";
import { attachMarkKeys, boxButton, choose, nearest, point } from "./pointing.js";
import { button, select } from "./dom.js";
import { markWords } from "./colours.js";
import { estimates, unsure } from "./sure.js";
import { plural, whole } from "./format.js";
import { dotRadius, drawDots, drawFrame, drawTrails, isInside, portraitFrame } from "./portrait.js";
import { attachZoom, zoomButtons } from "./zoom.js";

const DRAG = 5; // pixels after which a click is a brush

// What a reader wants to know about a head at a checkpoint.
export function headLines(app, head, checkpoint) {
  const { data, store } = app;
  const { component, choice } = store.state;
  const at = data.at(checkpoint, component, head);
  const source = data.choices[choice];
  const code = source.category[at];
  if (code === data.absent) return [data.name(head), `not measured ${data.place(checkpoint)}`];
  const kind = [data.kind("rotary", checkpoint, head), data.kind("attention", checkpoint, head)].filter(Boolean).join(", ");
  return [
    `Layer ${data.layers[head]}, head ${data.heads[head]}`,
    `${data.categoryName(code, component)}${data.runsAgainst(choice, at) ? `, ${data.about.against.name}` : ""}${kind ? ` (${kind})` : ""}`,
    ...estimates(data, store.state, checkpoint, head).map(([name, text]) => `${name} ${text}`),
    `n ${whole(source.n_q[at])} queries, ${whole(source.n_k[at])} keys`,
    ...unsure(data, store.state, checkpoint, head),
  ];
}

function draw(g) {
  const { app } = g;
  const { data, store, selection, motion } = app;
  const { checkpoint } = store.state;
  const frame = portraitFrame(app, { x: 0, y: 0, w: g.width, h: g.height }, store.state.zoom);
  const mask = selection.mask(checkpoint);
  const scene = { mask, x: motion.x, y: motion.y, checkpoint, radius: dotRadius(data.nHeads, g.width), errors: !motion.moving };
  drawFrame(g, frame);
  drawTrails(g, frame, scene);
  drawDots(g, frame, scene);
  const box = app.dragging ?? (store.state.brush?.kind === "box" ? store.state.brush : null);
  if (box) {
    const within = (values, to, low, high) => values.map((value) => Math.min(high, Math.max(low, to(value))));
    const [x0, x1] = within(box.r_q, frame.x, frame.left, frame.right);
    const [y0, y1] = within(box.r_k, frame.y, frame.top, frame.bottom);
    g.pen.rect(x0, y1, x1 - x0, y0 - y1, { fill: g.theme.ink, alpha: 0.06 });
    g.pen.rect(x0, y1, x1 - x0, y0 - y1, { stroke: g.theme.ink, width: 1, dash: [4, 3] });
  }
}

function frameOf(view) {
  return portraitFrame(view.app, { x: 0, y: 0, w: view.width, h: view.spec.height(view.width, view.app) }, view.app.store.state.zoom);
}

// Where the mark of each head is now.
function placesOf(view) {
  const [frame, { motion }] = [frameOf(view), view.app];
  return (h) => [frame.x(motion.x[h]), frame.y(motion.y[h])];
}

function attachPointer(view) {
  const { app, surface } = view;
  const headAt = (event) => {
    const [frame, place, { motion }] = [frameOf(view), placesOf(view), app];
    const seen = (h) => (isInside(frame, motion.x[h], motion.y[h]) ? place(h) : [NaN, NaN]);
    return nearest(seen, app.selection.mask(app.store.state.checkpoint), view.place(event));
  };
  let start = null;
  let dragged = false; // the click that follows a drag chooses nothing
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && (event.pointerType !== "touch" || view.boxing)) start = view.place(event);
  });
  surface.addEventListener("pointermove", (event) => {
    const [x, y] = view.place(event);
    if (start && Math.hypot(x - start[0], y - start[1]) > DRAG) {
      surface.setPointerCapture(event.pointerId);
      const frame = frameOf(view);
      const sorted = (a, b, to, [low, high]) => [a, b].map((value) => Math.max(low, Math.min(high, to(value)))).sort((one, other) => one - other);
      app.dragging = { r_q: sorted(start[0], x, frame.toQ, frame.range.r_q), r_k: sorted(start[1], y, frame.toK, frame.range.r_k) };
      app.tooltip.hide();
      view.refresh();
      return;
    }
    point(view, headAt(event), event, headLines);
  });
  surface.addEventListener("pointerup", () => {
    const { checkpoint, component, choice } = app.store.state;
    dragged = Boolean(app.dragging);
    if (dragged) {
      app.store.set({ brush: { kind: "box", checkpoint, component, choice, ...app.dragging } });
      app.dragging = null;
      view.stopBoxing?.();
      app.announce(`Box: ${app.selection.title()}`);
    }
    start = null;
  });
  surface.addEventListener("click", (event) => dragged || choose(view, headAt(event)));
  surface.addEventListener("pointerleave", () => app.store.set({ hover: null }));
}

// How many of the shown heads a closer look leaves in sight.
function zoomWords(app) {
  const { store, selection, data } = app;
  const { zoom, checkpoint, component, choice } = store.state;
  if (!zoom) return "";
  const { r_q: q, r_k: k } = data.choices[choice];
  const mask = selection.mask(checkpoint);
  const start = data.row(checkpoint, component);
  const seen = mask.filter((kept, h) => kept && isInside({ range: zoom }, q[start + h], k[start + h])).length;
  return `Zoomed: ${whole(seen)} of ${plural(selection.count(checkpoint), "head")} in sight. `;
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
    about: "One mark per head. Click a head to open it; drag to select heads in every view.",
    surface: "canvas",
    uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "head", "hover", "trail", "zoom", "theme"],
    card: "phase_portraits",
    categories: () => true,
    options: [!data.oneRun || data.checkpoints.length < 2 ? null : trails, zoomButtons(app), clear].filter(Boolean),
    height: (width) => Math.round(Math.min(620, Math.max(320, width * 0.92))),
    draw,
    table,
    attach: (each) => {
      attachPointer(each);
      attachMarkKeys(each, "scatter plot", placesOf, headLines);
      attachZoom(each, frameOf);
    },
    label: () => {
      const s = app.summaries.at(store.state.checkpoint);
      const shares = data.categories.map((c, i) => `${data.categoryName(i, store.state.component)} ${s.counts[i]}`).join(", ");
      return `Portrait ${data.place(store.state.checkpoint)}: ${plural(s.heads, "head")}; ${shares}. Arrow keys move between heads, Enter selects, Escape clears, plus and minus zoom.`;
    },
    note: () => {
      const { checkpoint, component, choice } = store.state;
      const { category } = data.choices[choice];
      const start = data.row(checkpoint, component);
      const missing = category.subarray(start, start + data.nHeads).filter((code) => code === data.undefinedCode).length;
      return `${zoomWords(app)}${markWords(app.layerKinds)}${missing ? `${plural(missing, "head")} without a defined correlation cannot be placed.` : ""}`;
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
