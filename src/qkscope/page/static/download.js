// Files made in the browser: pictures, drawings, tables.

import { CanvasPen, SvgPen, textWidth } from "./pen.js";
import { categoryColour, colours } from "./colours.js";
import { fileName, shorten } from "./format.js";
import { svgElement } from "./dom.js";

const HEADER = { plain: 58, categories: 78 };
const WIDTH = 960;
const SCALE = 2;

// Chromium drops, in silence, what a page saves beyond ten files within a second.
const APART = 110; // milliseconds
let free = 0; // when the next file may be saved

function offer(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// At once, or as soon as the browser takes one more.
export function save(blob, name) {
  const now = performance.now();
  const wait = Math.max(0, free - now);
  free = now + wait + APART;
  if (wait) setTimeout(() => offer(blob, name), wait);
  else offer(blob, name);
}

// A cell of a CSV file: numbers with every digit, what does not exist stays empty, as in qk.csv.
function cell(value) {
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csvText({ columns, rows }) {
  return `${[columns, ...rows].map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

export function saveCsv(table, name) {
  save(new Blob([csvText(table)], { type: "text/csv" }), `${name}.csv`);
}

function titleOf({ spec }) {
  return spec.subject ? `${spec.title}, ${spec.subject()}` : spec.title;
}

function hasCategories({ spec }) {
  return Boolean(spec.categories?.());
}

function headerHeight(view) {
  return hasCategories(view) ? HEADER.categories : HEADER.plain;
}

function header(pen, theme, view) {
  const { app } = view;
  const [text, note] = [`${app.data.about.title}: ${titleOf(view)}`, app.describe(view.window, view.spec.subject?.())];
  const fits = (line, size, weight) => {
    const letters = Math.floor((line.length * (WIDTH - 32)) / Math.max(1, textWidth(line, size, weight)));
    return shorten(line, Math.max(20, Math.min(line.length, letters)));
  };
  pen.text(fits(text, 16, 650), 16, 26, { size: 16, weight: 650, fill: theme.ink });
  pen.text(fits(note, 12, 400), 16, 45, { size: 12, fill: theme.muted });
  if (hasCategories(view)) drawKey(pen, theme, app);
}

// What the colours of categories mean, for a picture that has left the page.
function drawKey(pen, theme, app) {
  const { data } = app;
  const entries = [...data.categories.slice(0, -1), data.about.against];
  let x = 16;
  for (const category of entries) {
    pen.rect(x, 57, 10, 10, { fill: categoryColour(category, theme) });
    pen.text(category.name, x + 14, 66, { size: 11, fill: theme.muted });
    x += 14 + textWidth(category.name, 11) + 16;
  }
}

function paint(view, pen, height) {
  const theme = colours(false); // files are for paper
  pen.rect(0, 0, WIDTH, height + headerHeight(view), { fill: theme.paper });
  header(pen, theme, view);
  return theme;
}

export function svgText(view) {
  const [height, above] = [view.spec.height(WIDTH, view.app), headerHeight(view)];
  const root = svgElement("svg", { xmlns: "http://www.w3.org/2000/svg", width: WIDTH, height: height + above, viewBox: `0 0 ${WIDTH} ${height + above}` });
  const theme = paint(view, new SvgPen(root), height);
  const group = svgElement("g", { transform: `translate(0 ${above})` });
  root.append(group);
  view.spec.draw({ pen: new SvgPen(group), width: WIDTH, height, theme, app: view.app, details: view.details, still: true });
  return new XMLSerializer().serializeToString(root);
}

export function pngBlob(view) {
  const [height, above] = [view.spec.height(WIDTH, view.app), headerHeight(view)];
  const canvas = document.createElement("canvas");
  canvas.width = WIDTH * SCALE;
  canvas.height = (height + above) * SCALE;
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  const pen = new CanvasPen(context);
  const theme = paint(view, pen, height);
  context.translate(0, above);
  view.spec.draw({ pen, width: WIDTH, height, theme, app: view.app, details: view.details, still: true });
  // Not toBlob: a browser may put that off until the page is idle, and the click is then long ago.
  const letters = atob(canvas.toDataURL("image/png").split(",")[1]);
  return new Blob([Uint8Array.from(letters, (letter) => letter.charCodeAt(0))], { type: "image/png" });
}

export async function saveView(view, kind) {
  if (view.spec.details) await view.unpacked();
  const subject = view.spec.subject ? [view.spec.subject()] : [];
  const name = fileName("qkscope", view.app.data.about.title, view.spec.id, ...subject, ...view.app.where(view.window));
  if (kind === "csv") saveCsv(view.spec.table(view.app, view.details), name);
  else if (kind === "svg") save(new Blob([svgText(view)], { type: "image/svg+xml" }), `${name}.svg`);
  else save(pngBlob(view), `${name}.png`);
}
