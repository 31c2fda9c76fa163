// Colours: blue and red are queries and keys, categories and signed values have maps of their own, the rest follows light
// or dark.

const LIGHT = {
  dark: false, paper: "#ffffff", ink: "#1f2937", muted: "#5f6875", line: "#9ca3af", faint: "#e2e5ea", hatch: "#c8cdd5", zone: 0.09, edge: "#ffffff", part: null,
};
const DARK = {
  dark: true, paper: "#161b22", ink: "#e6e9ee", muted: "#a3adba", line: "#6b7684", faint: "#2c343f", hatch: "#4a5461", zone: 0.15, edge: "#aeb7c3", part: "#8d99aa", // the first colour of parts is for light paper
};

export function colours(dark) {
  return dark ? DARK : LIGHT;
}

// Colours of parts that are neither queries nor keys nor categories, on this paper.
export function partColours({ app, theme }) {
  const [first, ...rest] = app.data.about.colours.parts;
  return [theme.part ?? first, ...rest];
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// The colour of a value from 0 to 1 on a row of stops.
export function ramp(stops, value) {
  const place = Math.min(1, Math.max(0, value)) * (stops.length - 1);
  const first = Math.min(stops.length - 2, Math.floor(place));
  const [low, high] = [channels(stops[first]), channels(stops[first + 1])];
  const mixed = low.map((c, i) => Math.round(c + (high[i] - c) * (place - first)));
  return `#${mixed.map((c) => c.toString(16).padStart(2, "0")).join("")}`;
}

// Below 0 as two decimals show it: what is printed as 0.00 is not painted as negative.
export function isNegative(value) {
  return value <= -0.005;
}

// A signed value from -1 to 1 on the one diverging map; what is printed as 0.00 has the colour of 0.
export function signedColour(about, value) {
  const shown = Math.abs(value) < 0.005 ? 0 : value;
  return ramp(about.colours.diverging, (shown + 1) / 2);
}

// Black or white, whichever reads better (WCAG contrast).
export function readableOn(hex) {
  const [r, g, b] = channels(hex).map((c) => {
    const share = c / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) ? "#000000" : "#ffffff";
}

// The color of a category, on this paper.
export function categoryColour(category, theme) {
  return theme.dark ? category.dark : category.colour;
}

// How a category is painted; undefined is an outline. Position-dominated heads whose keys track position in
// reverse have a color of their own.
export function categoryPaint(data, code, theme, against = false) {
  if (code === data.undefinedCode) return { fill: theme.paper, stroke: theme.line, width: 1 };
  if (against && code === 0) return { fill: categoryColour(data.about.against, theme) };
  return { fill: data.categories[code] ? categoryColour(data.categories[code], theme) : theme.faint };
}

// The same for a head at a place of the arrays of a choice.
export function headPaint(data, choice, at, theme) {
  return categoryPaint(data, data.choices[choice].category[at], theme, data.runsAgainst(choice, at));
}

// The mark of a kind of layer: how it encodes position, and whether it sees all of the window.
export function markOf(kind) {
  const limited = /sliding|chunked/.test(kind);
  if (kind.startsWith("rotary")) return limited ? "diamond" : "circle";
  if (kind.startsWith("NoPE")) return limited ? "down" : "triangle";
  return "square";
}

const MARK_NAMES = { circle: "circles", diamond: "diamonds", triangle: "triangles", down: "triangles that point down", square: "squares" };

// What the marks mean, where there is more than one kind of layer.
export function markWords(kinds) {
  if (kinds.length < 2) return "";
  const byMark = new Map();
  for (const kind of kinds) byMark.set(markOf(kind), [...(byMark.get(markOf(kind)) ?? []), kind]);
  return `Layers by their marks: ${[...byMark].map(([mark, list]) => `${MARK_NAMES[mark]}: ${list.join(" and ")}`).join("; ")}. `;
}
