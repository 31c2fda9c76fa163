// A view: its title, its drawing, one quiet menu, and its card below. It draws itself again when something it uses has
// changed and it can be seen, tells what is under the pointer or under the arrow keys, and saves itself.

import { CanvasPen, SvgPen } from "./pen.js";
import { button, element, svgElement } from "./dom.js";
import { saveView } from "./download.js";
import { WINDOW_NAMES, shownWindow } from "./both_windows.js";

export function inside(hit, x, y) {
  return x >= hit.x && x <= hit.x + hit.w && y >= hit.y && y <= hit.y + hit.h;
}

// A menu that closes when a reader goes elsewhere.
function menu(title, items) {
  const node = element("details", { class: "menu" }, element("summary", { "aria-label": `Card and files of “${title}”` }, "⋯"), element("div", { class: "tools" }, ...items.filter(Boolean)));
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !node.open) return;
    node.open = false;
    node.firstElementChild.focus();
    event.stopPropagation();
  });
  node.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !node.contains(event.relatedTarget)) node.open = false;
  });
  return node;
}

// One observer for all views: [node, what to tell].
const told = new WeakMap();
const tell = (which) => (entries) => entries.forEach((entry) => told.get(entry.target)?.[which](entry));
const watchers = {
  size: new ResizeObserver(tell("size")),
  near: new IntersectionObserver(tell("near"), { rootMargin: "200px" }),
  sight: new IntersectionObserver(tell("sight")),
};

const whenIdle = window.requestIdleCallback ?? ((action) => setTimeout(action, 100));

export class View {
  // spec: id, title, about (text), surface ("svg" | "canvas"), uses (keys of the state), height(width), draw(g) -> hits,
  // label() for screen readers, table(), card (name of its card), options (nodes), attach(view) for own interaction,
  // details (true: it needs what is unpacked later), window() -> "own" | "common" | null where that is not the reader's
  // choice, subject() (the head or layer that it is about), categories() (whether it has the colors of categories)
  constructor(app, spec) {
    Object.assign(this, { app, spec, hits: [], seen: false, inSight: false, stale: true, waiting: false, width: 0, height: 0, at: null, details: null });
    this.surface = spec.surface === "canvas" ? element("canvas") : svgElement("svg");
    this.surface.setAttribute("class", "surface");
    this.surface.setAttribute("role", "img");
    this.surface.setAttribute("aria-label", spec.title); // until it is drawn and says more
    this.card = element("div", { class: "card-under", hidden: true });
    this.chosen = element("span", { class: "chosen-heads", hidden: true });
    this.length = element("span", { class: "window-note", hidden: true });
    this.mark = element("div", { class: "hit-mark", hidden: true, "aria-hidden": "true" });
    this.node = element(
      "figure",
      { class: `view view-${spec.id}`, id: `view-${spec.id}`, "aria-labelledby": `title-${spec.id}` },
      element("div", { class: "view-head" }, element("h3", { id: `title-${spec.id}` }, spec.title), this.length, this.chosen, this.#menu()),
      spec.about ? element("p", { class: "about" }, spec.about) : null,
      spec.options?.length ? element("div", { class: "options" }, ...spec.options) : null,
      (this.holder = element("div", { class: "holder" }, this.surface, this.mark)),
      (this.note = element("figcaption", { class: "note" })),
      this.card,
    );
    this.surface.addEventListener("pointermove", (event) => this.#hover(event));
    this.surface.addEventListener("pointerleave", () => app.tooltip.hide());
    this.surface.addEventListener("click", (event) => this.#click(event));
    if (spec.attach) spec.attach(this);
    else this.#attachKeys();
    app.store.subscribe((changed) => {
      if (spec.uses.some((key) => changed.has(key))) this.refresh();
      if (changed.has("both") || changed.has("choice")) this.#sayWindow();
    });
    this.#watch();
  }

  // Its width, whether it is near what is seen, and whether it is in it.
  #watch() {
    told.set(this.holder, {
      size: () => {
        if (this.holder.clientWidth === this.width) return;
        this.measure();
        this.reserve();
        this.refresh();
      },
    });
    told.set(this.node, {
      near: ({ isIntersecting }) => {
        this.seen = isIntersecting;
        if (this.seen && this.spec.details && !this.details) this.#unpack();
        if (this.seen && this.stale) this.refresh();
      },
      sight: ({ isIntersecting }) => {
        this.inSight = isIntersecting;
        if (this.inSight && this.stale) this.refresh();
      },
    });
    watchers.size.observe(this.holder);
    watchers.near.observe(this.node);
    watchers.sight.observe(this.node);
  }

  async #unpack() {
    await this.unpacked();
    this.refresh();
  }

  // With the details of heads, where it shows some.
  async unpacked() {
    if (this.spec.details) this.details ??= (await this.app.data.later()).details;
    return this;
  }

  // The window that it shows.
  get window() {
    return shownWindow(this.app, this.spec);
  }

  #menu() {
    const { app, spec } = this;
    const tool = (kind, text) => button(text, () => saveView(this, kind), { class: "tool", "aria-label": `Download “${spec.title}” as ${text}` });
    const card = spec.card && app.cards.has(spec.card) ? button("Card", () => app.cards.toggle(this.card, spec.card), { class: "tool", "aria-label": `Card of “${spec.title}”` }) : null;
    return menu(spec.title, [card, tool("png", "PNG"), tool("svg", "SVG"), spec.table ? tool("csv", "CSV") : null]);
  }

  measure() {
    this.width = this.holder.clientWidth;
  }

  // Take the room that the drawing will need, so that nothing moves when it comes into view.
  reserve() {
    const { app, spec } = this;
    this.height = spec.height(this.width, app);
    this.surface.style.height = `${this.height}px`;
    this.#say(this.note, spec.note ? spec.note(app) : "");
    this.chosen.hidden = app.selection.allHeads || spec.allHeads === true;
    this.#say(this.chosen, this.chosen.hidden ? "" : app.selection.title());
    this.#sayWindow();
  }

  // Which of the two context lengths it shows, where it shows one.
  #sayWindow() {
    const name = this.app.data.choices.common ? WINDOW_NAMES[this.window] : undefined;
    this.length.hidden = !name;
    this.#say(this.length, name ?? "");
  }

  #say(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  // Draw in the next frame; what is only near waits until nothing else is to be done, what is far until it is near.
  refresh() {
    this.stale = true;
    delete this.surface.dataset.drawn;
    if (!this.seen || this.waiting === "frame") return;
    const act = (how) => () => {
      if (this.waiting === how) this.waiting = false;
      if (this.stale) this.draw();
    };
    if (this.inSight) {
      this.waiting = "frame";
      requestAnimationFrame(act("frame"));
    } else if (!this.waiting) {
      this.waiting = "idle";
      whenIdle(act("idle"));
    }
  }

  draw() {
    const { spec, app } = this;
    if (!this.width) this.measure();
    this.reserve();
    if (this.width < 40) return;
    this.paint();
    this.stale = false;
    if (!spec.details || this.details) this.surface.dataset.drawn = "yes";
    if (spec.label) this.surface.setAttribute("aria-label", spec.label(app));
  }

  // Only the drawing: what a moving picture does many times a second.
  paint() {
    const { spec, app, width, height, details } = this;
    this.hits = spec.draw({ pen: this.#pen(width, height), width, height, theme: app.theme(), app, details, still: false }) ?? [];
    this.#markHit();
  }

  #pen(width, height) {
    if (this.spec.surface !== "canvas") {
      this.surface.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.surface.replaceChildren();
      return new SvgPen(this.surface);
    }
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.surface.width !== w || this.surface.height !== h) {
      this.surface.width = w;
      this.surface.height = h;
    }
    const context = this.surface.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return new CanvasPen(context);
  }

  place(event) {
    const box = this.surface.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #find(event) {
    const [x, y] = this.place(event);
    return this.hits.findLast((hit) => inside(hit, x, y));
  }

  #hover(event) {
    const hit = this.#find(event);
    this.surface.classList.toggle("clickable", Boolean(hit?.click));
    if (hit) this.app.tooltip.show(hit.lines, event.clientX, event.clientY);
    else if (!this.spec.attach) this.app.tooltip.hide();
  }

  #click(event) {
    const hit = this.#find(event);
    hit?.click?.();
    if (hit && event.pointerType === "touch") this.app.tooltip.show(hit.lines, event.clientX, event.clientY);
  }

  // What the mouse finds, arrow keys find too: left and right, up and down go to the nearest part in that direction.
  #attachKeys() {
    const { app, surface } = this;
    surface.setAttribute("tabindex", "0");
    surface.setAttribute("role", "application");
    surface.setAttribute("aria-roledescription", "chart; arrow keys read it");
    surface.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (way && this.hits.length) this.#moveTo(way);
      else if ((event.key === "Enter" || event.key === " ") && this.hits[this.at]) this.hits[this.at].click?.();
      else if (event.key === "Escape" && this.at !== null) this.#leave();
      else return;
      event.preventDefault();
    });
    surface.addEventListener("blur", () => this.#leave());
    surface.addEventListener("focus", () => app.tooltip.hide());
  }

  #moveTo([dx, dy]) {
    const middle = (hit) => [hit.x + hit.w / 2, hit.y + hit.h / 2];
    const from = this.hits[this.at];
    let best = from ? this.at : 0;
    let least = Infinity;
    this.hits.forEach((hit, i) => {
      if (!from || i === this.at) return;
      const [across, down] = middle(hit).map((value, side) => value - middle(from)[side]);
      const along = across * dx + down * dy;
      const cost = along + 3 * (Math.abs(across * dy) + Math.abs(down * dx));
      if (along > 0.5 && cost < least) [best, least] = [i, cost];
    });
    this.at = best;
    this.#markHit();
    const box = this.surface.getBoundingClientRect();
    const [x, y] = middle(this.hits[best]);
    this.app.tooltip.show(this.hits[best].lines, box.left + x, box.top + y);
    this.app.announce(this.hits[best].lines.join(", "));
  }

  #markHit() {
    const hit = this.at === null ? null : this.hits[this.at];
    this.mark.hidden = !hit;
    if (hit) Object.assign(this.mark.style, { left: `${hit.x}px`, top: `${hit.y}px`, width: `${hit.w}px`, height: `${hit.h}px` });
  }

  #leave() {
    this.at = null;
    this.#markHit();
    this.app.tooltip.hide();
  }
}
