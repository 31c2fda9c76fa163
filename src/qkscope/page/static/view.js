// A view: its title, its drawing, its buttons. It draws itself again when something it uses has changed and it can be
// seen, tells what is under the pointer, and saves itself.

import { CanvasPen, SvgPen } from "./pen.js";
import { button, element, svgElement } from "./dom.js";
import { saveView } from "./download.js";

function inside(hit, x, y) {
  return x >= hit.x && x <= hit.x + hit.w && y >= hit.y && y <= hit.y + hit.h;
}

export class View {
  // spec: id, title, about (text), surface ("svg" | "canvas"), uses (keys of the state), height(width), draw(g) -> hits,
  // label() for screen readers, table(), card (name of its card), options (nodes), attach(view) for own interaction
  constructor(app, spec) {
    Object.assign(this, { app, spec, hits: [], seen: false, stale: true, width: 0, height: 0 });
    this.surface = spec.surface === "canvas" ? element("canvas") : svgElement("svg");
    this.surface.setAttribute("class", "surface");
    if (!spec.attach) this.surface.setAttribute("role", "img");
    this.surface.setAttribute("aria-label", spec.title); // until it is drawn and says more
    this.node = element(
      "figure",
      { class: `view view-${spec.id}`, id: `view-${spec.id}`, "aria-labelledby": `title-${spec.id}` },
      element("div", { class: "view-head" }, element("h3", { id: `title-${spec.id}` }, spec.title), this.#tools()),
      element("p", { class: "about" }, spec.about ?? ""),
      spec.options?.length ? element("div", { class: "options" }, ...spec.options) : null,
      (this.holder = element("div", { class: "holder" }, this.surface)),
      (this.note = element("figcaption", { class: "note" })),
    );
    this.surface.addEventListener("pointermove", (event) => this.#hover(event));
    this.surface.addEventListener("pointerleave", () => app.tooltip.hide());
    this.surface.addEventListener("click", (event) => this.#click(event));
    spec.attach?.(this);
    app.store.subscribe((changed) => {
      if (spec.uses.some((key) => changed.has(key))) this.refresh();
    });
    new ResizeObserver(() => {
      if (this.holder.clientWidth === this.width) return;
      this.reserve();
      this.refresh();
    }).observe(this.holder);
    new IntersectionObserver(
      (entries) => {
        this.seen = entries[entries.length - 1].isIntersecting;
        if (this.seen && this.stale) this.refresh();
      },
      { rootMargin: "200px" },
    ).observe(this.node);
  }

  #tools() {
    const { app, spec } = this;
    const tool = (kind, text) =>
      button(text, () => saveView(this, kind), { class: "tool", "aria-label": `Download “${spec.title}” as ${text}` });
    const card = spec.card && app.hasCard(spec.card) ? button("Card", () => app.showCard(spec.card), { class: "tool", "aria-label": `Card of “${spec.title}”` }) : null;
    return element("div", { class: "tools" }, card, tool("png", "PNG"), tool("svg", "SVG"), spec.table ? tool("csv", "CSV") : null);
  }

  // Take the room that the drawing will need, so that nothing moves when it comes into view.
  reserve() {
    this.width = this.holder.clientWidth;
    this.height = this.spec.height(this.width, this.app);
    this.surface.style.height = `${this.height}px`;
    this.note.textContent = this.spec.note ? this.spec.note(this.app) : "";
  }

  // Draw in the next frame; what cannot be seen waits until it can.
  refresh() {
    this.stale = true;
    if (!this.seen || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const { spec, app } = this;
    this.reserve();
    if (this.width < 40) return;
    this.paint();
    this.stale = false;
    if (spec.label) this.surface.setAttribute("aria-label", spec.label(app));
  }

  // Only the drawing: what a moving picture does many times a second.
  paint() {
    const { spec, app, width, height } = this;
    this.hits = spec.draw({ pen: this.#pen(width, height), width, height, theme: app.theme(), app, still: false }) ?? [];
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
    this.#find(event)?.click?.();
  }
}
