// One way to draw, two results: on a canvas (moving dots, PNG) or as SVG (still views, SVG files). All shapes carry
// their own colours, so a file looks the same outside the page.

import { svgElement } from "./dom.js";

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const measuring = document.createElement("canvas").getContext("2d");

function font(size, weight) {
  return `${weight} ${size}px ${FONT}`;
}

const widths = new Map();
export function textWidth(text, size = 12, weight = 400) {
  const key = `${size} ${weight} ${text}`;
  if (!widths.has(key)) {
    if (widths.size > 20_000) widths.clear();
    measuring.font = font(size, weight);
    widths.set(key, measuring.measureText(text).width);
  }
  return widths.get(key);
}

// The corners of a triangle, diamond or square that looks as large as a circle of radius r.
function corners(kind, x, y, r) {
  if (kind === "triangle") {
    const [wide, tall] = [1.2 * r, 1.1 * r];
    return [[x, y - 1.25 * r], [x + wide, y + tall - 0.25 * r], [x - wide, y + tall - 0.25 * r]];
  }
  if (kind === "down") {
    const [wide, tall] = [1.2 * r, 1.1 * r];
    return [[x, y + 1.25 * r], [x + wide, y - tall + 0.25 * r], [x - wide, y - tall + 0.25 * r]];
  }
  if (kind === "diamond") {
    const reach = 1.25 * r;
    return [[x, y - reach], [x + reach, y], [x, y + reach], [x - reach, y]];
  }
  const half = 0.89 * r;
  return [[x - half, y - half], [x + half, y - half], [x + half, y + half], [x - half, y + half]];
}

function asCommands(points, closed) {
  const commands = points.map(([x, y], i) => [i ? "L" : "M", x, y]);
  return closed ? [...commands, ["Z"]] : commands;
}

class Pen {
  line(points, style) {
    this.shape(asCommands(points, false), { fill: "none", ...style });
  }

  polygon(points, style) {
    this.shape(asCommands(points, true), style);
  }

  mark(kind, x, y, r, style) {
    if (kind === "circle") this.circle(x, y, r, style);
    else this.polygon(corners(kind, x, y, r), style);
  }
}

export class CanvasPen extends Pen {
  constructor(context) {
    super();
    this.context = context;
  }

  #paint({ fill = "none", stroke = "none", width = 1, dash = [], alpha = 1 }) {
    const { context } = this;
    context.globalAlpha = alpha;
    if (fill !== "none") {
      context.fillStyle = fill;
      context.fill();
    }
    if (stroke !== "none") {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.setLineDash(dash);
      context.lineJoin = "round";
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  shape(commands, style) {
    const { context } = this;
    context.beginPath();
    for (const [letter, ...at] of commands) {
      if (letter === "M") context.moveTo(...at);
      else if (letter === "L") context.lineTo(...at);
      else if (letter === "C") context.bezierCurveTo(...at);
      else context.closePath();
    }
    this.#paint(style);
  }

  rect(x, y, width, height, style) {
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.#paint(style);
  }

  circle(x, y, r, style) {
    this.context.beginPath();
    this.context.arc(x, y, r, 0, 2 * Math.PI);
    this.#paint(style);
  }

  text(text, x, y, { size = 12, fill = "#000", anchor = "start", weight = 400, rotate = 0, alpha = 1 } = {}) {
    const { context } = this;
    context.save();
    context.translate(x, y);
    context.rotate((rotate * Math.PI) / 180);
    context.font = font(size, weight);
    context.textAlign = { start: "left", middle: "center", end: "right" }[anchor];
    context.textBaseline = "alphabetic";
    context.globalAlpha = alpha;
    context.fillStyle = fill;
    context.fillText(text, 0, 0);
    context.restore();
  }
}

// Draws with another pen, everything moved by so much: several charts in one drawing.
export class ShiftedPen extends Pen {
  constructor(pen, dx, dy) {
    super();
    Object.assign(this, { pen, dx, dy });
  }

  shape(commands, style) {
    this.pen.shape(commands.map(([letter, ...at]) => [letter, ...at.map((value, i) => value + (i % 2 ? this.dy : this.dx))]), style);
  }

  rect(x, y, width, height, style) {
    this.pen.rect(x + this.dx, y + this.dy, width, height, style);
  }

  circle(x, y, r, style) {
    this.pen.circle(x + this.dx, y + this.dy, r, style);
  }

  text(text, x, y, style) {
    this.pen.text(text, x + this.dx, y + this.dy, style);
  }
}

const rounded = (value) => Math.round(value * 100) / 100;

export class SvgPen extends Pen {
  constructor(root) {
    super();
    this.root = root;
  }

  #add(tag, attributes, { fill = "none", stroke = "none", width = 1, dash = [], alpha = 1, part }) {
    const all = { ...attributes, fill };
    if (part) all["data-part"] = part;
    if (stroke !== "none") Object.assign(all, { stroke, "stroke-width": width, "stroke-linejoin": "round" });
    if (stroke !== "none" && dash.length) all["stroke-dasharray"] = dash.join(" ");
    if (alpha !== 1) all.opacity = alpha;
    this.root.append(svgElement(tag, all));
  }

  shape(commands, style) {
    const d = commands.map(([letter, ...at]) => `${letter}${at.map(rounded).join(" ")}`).join("");
    this.#add("path", { d }, style);
  }

  rect(x, y, width, height, style) {
    const [w, h] = [Math.max(0, rounded(width)), Math.max(0, rounded(height))];
    this.#add("rect", { x: rounded(x), y: rounded(y), width: w, height: h }, style);
  }

  circle(x, y, r, style) {
    this.#add("circle", { cx: rounded(x), cy: rounded(y), r: rounded(r) }, style);
  }

  text(text, x, y, { size = 12, fill = "#000", anchor = "start", weight = 400, rotate = 0, alpha = 1 } = {}) {
    const attributes = { x: rounded(x), y: rounded(y), fill, "font-size": size, "font-family": FONT };
    if (anchor !== "start") attributes["text-anchor"] = anchor;
    if (weight !== 400) attributes["font-weight"] = weight;
    if (rotate) attributes.transform = `rotate(${rotate} ${rounded(x)} ${rounded(y)})`;
    if (alpha !== 1) attributes.opacity = alpha;
    this.root.append(svgElement("text", attributes, text));
  }
}
