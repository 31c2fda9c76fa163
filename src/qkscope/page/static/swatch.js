// A small mark in the colour and shape of a head.

import { SvgPen } from "./pen.js";
import { categoryPaint, markOf } from "./colours.js";
import { svgElement } from "./dom.js";

export function swatchOf(app, code, kind = "rotary", against = false) {
  const node = svgElement("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true", class: "swatch" });
  new SvgPen(node).mark(markOf(kind), 6, 6.4, 4.6, categoryPaint(app.data, code, app.theme(), against));
  return node;
}
