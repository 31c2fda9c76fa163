// One state for all views, and its form in the address: a link carries the whole state and replaces what was there.

import { tokenAxes } from "./collage.js";

export function createStore(initial) {
  const state = { ...initial };
  const listeners = [];
  return {
    state,
    subscribe: (listener) => listeners.push(listener),
    // Something changed that is not in the state itself, such as the reader's preference for dark.
    touch: (key) => listeners.forEach((listener) => listener(new Set([key]))),
    // Listeners hear which keys have changed; a change to the same value is none.
    set(changes) {
      const changed = new Set(Object.keys(changes).filter((key) => !same(state[key], changes[key])));
      if (!changed.size) return;
      Object.assign(state, changes);
      for (const listener of listeners) listener(changed);
    },
  };
}

function same(one, other) {
  return one === other || (typeof one === "object" && JSON.stringify(one) === JSON.stringify(other));
}

// What the filters leave out at first. `at` is where categories were looked up when one was switched off.
export function nothingHidden() {
  return { phase: [], category: [], rotary: [], attention: [], unsure: [], at: null };
}

// Checkpoints that are compared at first: the first and the last, of seeds and models as many as fit side by side.
export const MOST_COMPARED = 6;
function firstCompared(data) {
  const last = data.checkpoints.length - 1;
  return data.oneRun ? [0, last] : data.checkpoints.map((_, c) => c).slice(0, Math.max(2, Math.min(4, last + 1)));
}

// What the study asks for, where its checkpoints have these numbers.
function firstAxis(data) {
  const { by, scale } = data.about.axis ?? {};
  const wanted = by ? `${scale === "log" ? "log " : ""}${by}` : "order";
  return data.axes.includes(wanted) ? wanted : "order";
}

// The step that the first screen breaks down by cause, where the page has it; null where it breaks down none.
function firstStep(data) {
  const step = data.about.summary.findings.find((each) => each.step)?.step;
  const [from, to] = (step ?? []).map((name) => data.checkpoints.findIndex((c) => c.name === name));
  return data.about.split?.some((row) => row.from === from && row.to === to) ? [from, to] : null;
}

export function initialState(data) {
  return {
    checkpoint: data.checkpoints.length - 1,
    component: 0,
    choice: "own",
    both: Boolean(data.choices.common), // views over checkpoints show native length and common window in one picture
    measure: "r_k",
    trail: data.nHeads > 200 ? "0" : "3", // hundreds of trails are a haze
    head: null,
    hover: null,
    playing: false,
    layers: null, // [first, last]
    hidden: nothingHidden(),
    brush: null, // a box in the portrait or in the map
    zoom: null, // the part of the portrait that is shown: { r_q, r_k }
    compare: firstCompared(data),
    windowMeasure: "r_q",
    splitStep: firstStep(data), // of the waterfall: [from, to]; null: the step to the slider
    split: true, // by layer type
    axis: firstAxis(data), // of checkpoints: order, step, tokens, and their logarithms
    tokenAxes: ["pc0", "pc1"], // along which the drawer shows kept tokens
    tokenDocument: null, // the document that is drawn over the others
    theme: null,
  };
}

// What can be followed over shorter windows.
export const WINDOW_MEASURES = ["r_q", "r_k", "position-dominated", "discordant"];
const SLIDER = "to-slider"; // the step of the waterfall in an address, where it is the one to the slider
const LINKED = ["head", "checkpoint", "component", "choice", "both", "measure", "layers", "hidden", "brush", "zoom", "compare", "windowMeasure", "splitStep", "split", "axis", "tokenAxes", "tokenDocument"];

// Whether a change belongs into the address.
export function isLinked(changed) {
  return LINKED.some((key) => changed.has(key));
}

// A checkpoint as it stands in an address: its label, or its name where labels repeat.
function checkpointKey(data, index) {
  const { label, name } = data.checkpoints[index];
  return data.checkpoints.filter((c) => c.label === label).length === 1 ? label : name;
}

function checkpointIndex(data, key) {
  const byLabel = data.checkpoints.findIndex((c) => c.label === key);
  return byLabel >= 0 ? byLabel : data.checkpoints.findIndex((c) => c.name === key);
}

const short = (value) => String(Number(value.toFixed(4)));

function brushText(data, brush) {
  if (brush.kind === "cells") return `cells ${brush.layers.join(" ")} ${brush.heads.join(" ")}`;
  return `box ${[...brush.r_q, ...brush.r_k].map(short).join(" ")} ${brush.component} ${brush.choice} ${checkpointKey(data, brush.checkpoint)}`;
}

export function toHash(data, state) {
  const entries = new URLSearchParams();
  const first = initialState(data);
  if (state.head !== null) entries.set("head", `${data.layers[state.head]}.${data.heads[state.head]}`);
  entries.set("ckpt", checkpointKey(data, state.checkpoint));
  if (state.component) entries.set("pc", data.components[state.component]);
  if (state.choice === "common") entries.set("window", "common");
  else if (first.both && !state.both) entries.set("window", "own");
  if (state.measure !== first.measure) entries.set("map", state.measure);
  if (state.layers) entries.set("layers", state.layers.join("-"));
  for (const [what, list] of Object.entries(state.hidden)) {
    if (what !== "at") for (const each of list) entries.append(`without-${what}`, each);
  }
  if (state.hidden.category.length && state.hidden.at !== null) entries.set("at", checkpointKey(data, state.hidden.at));
  if (state.brush) entries.set("box", brushText(data, state.brush));
  if (state.zoom) entries.set("zoom", [...state.zoom.r_q, ...state.zoom.r_k].map(short).join(" "));
  if (!same(state.compare, first.compare)) for (const c of state.compare) entries.append("compare", checkpointKey(data, c));
  if (state.windowMeasure !== first.windowMeasure) entries.set("over", state.windowMeasure);
  if (!same(state.splitStep, first.splitStep)) for (const key of state.splitStep?.map((c) => checkpointKey(data, c)) ?? [SLIDER]) entries.append("step", key);
  if (!state.split) entries.set("kinds", "together");
  if (state.axis !== first.axis) entries.set("axis", state.axis);
  if (!same(state.tokenAxes, first.tokenAxes)) entries.set("tokens", state.tokenAxes.join(" "));
  if (state.tokenDocument !== null) entries.set("document", state.tokenDocument);
  return `#${entries}`;
}

function readBrush(data, text) {
  const words = text.split(" ");
  if (words[0] === "cells") {
    const numbers = words.slice(1, 5).map(Number);
    return numbers.length === 4 && numbers.every(Number.isInteger) ? { kind: "cells", layers: numbers.slice(0, 2), heads: numbers.slice(2) } : null;
  }
  const numbers = words.slice(1, 6).map(Number);
  const checkpoint = checkpointIndex(data, words.slice(7).join(" "));
  if (words[0] !== "box" || numbers.length < 5 || !numbers.every(Number.isFinite) || checkpoint < 0 || !data.choices[words[6]] || !(numbers[4] in data.components)) return null;
  return { kind: "box", checkpoint, component: numbers[4], choice: words[6], r_q: numbers.slice(0, 2), r_k: numbers.slice(2, 4) };
}

function readZoom(text) {
  const numbers = text.split(" ").map(Number);
  if (numbers.length !== 4 || !numbers.every((value) => Math.abs(value) <= 1.1) || numbers[0] >= numbers[1] || numbers[2] >= numbers[3]) return null;
  return { r_q: numbers.slice(0, 2), r_k: numbers.slice(2) };
}

function readTokenAxes(data, text) {
  const axes = text.split(" ");
  return axes.length === 2 && axes[0] !== axes[1] && axes.every((axis) => tokenAxes(data).includes(axis)) ? axes : null;
}

function readHidden(data, entries) {
  const hidden = nothingHidden();
  const known = {
    phase: data.checkpoints.map((c) => c.phase ?? ""), category: data.categories.map((c) => c.name),
    rotary: data.texts.rotary, attention: data.texts.attention, unsure: ["unstable", "undecided", "sign_unknown"],
  };
  for (const [what, values] of Object.entries(known)) hidden[what] = entries.getAll(`without-${what}`).filter((each) => values.includes(each));
  if (new Set(known.phase).size === new Set(hidden.phase).size) hidden.phase = []; // something must be shown
  return hidden;
}

// The whole state that an address stands for, and in words what it names and the data lacks.
export function fromHash(data, hash) {
  const entries = new URLSearchParams(hash.replace(/^#/, ""));
  const first = initialState(data);
  const linked = Object.fromEntries(LINKED.map((key) => [key, first[key]]));
  const problems = [];
  const read = (key, find, keep) => {
    if (!entries.has(key)) return;
    const found = find(entries.get(key));
    if (found === undefined || found === null || found === -1) problems.push(`${key} ${entries.get(key)}`);
    else keep(found);
  };
  read("head", (text) => data.byName.get(`L${text.replace(".", "H")}`), (head) => (linked.head = head));
  read("ckpt", (text) => checkpointIndex(data, text), (checkpoint) => (linked.checkpoint = checkpoint));
  read("pc", (text) => data.components.indexOf(Number(text)), (component) => (linked.component = component));
  read("window", (text) => (text === "own" || (text === "common" && data.choices.common) ? text : null), (choice) => Object.assign(linked, { choice, both: false }));
  read("map", (text) => (data.measures.has(text) ? text : null), (measure) => (linked.measure = measure));
  read("layers", (text) => /^(\d+)-(\d+)$/.exec(text), ([, a, b]) => (linked.layers = [Number(a), Math.min(Number(b), data.nLayers - 1)]));
  read("box", (text) => readBrush(data, text), (brush) => (linked.brush = brush));
  read("zoom", readZoom, (zoom) => (linked.zoom = zoom));
  read("over", (text) => (WINDOW_MEASURES.includes(text) ? text : null), (measure) => (linked.windowMeasure = measure));
  read("kinds", (text) => text, () => (linked.split = false));
  read("axis", (text) => (data.axes.includes(text) ? text : null), (axis) => (linked.axis = axis));
  read("tokens", (text) => readTokenAxes(data, text), (axes) => (linked.tokenAxes = axes));
  read("document", (text) => (/^\d{1,9}$/.test(text) ? Number(text) : null), (document) => (linked.tokenDocument = document));
  linked.hidden = readHidden(data, entries);
  if (linked.hidden.category.length) linked.hidden.at = Math.max(0, entries.has("at") ? checkpointIndex(data, entries.get("at")) : linked.checkpoint);
  const compared = entries.getAll("compare").map((key) => checkpointIndex(data, key)).filter((c) => c >= 0).slice(0, MOST_COMPARED);
  if (compared.length >= 2) linked.compare = compared;
  const step = entries.getAll("step").map((key) => checkpointIndex(data, key)).filter((c) => c >= 0);
  if (step.length === 2) linked.splitStep = step;
  else if (entries.get("step") === SLIDER) linked.splitStep = null;
  return { changes: linked, problems };
}

export function writeHash(hash) {
  try {
    window.history.replaceState(null, "", hash);
  } catch {
    window.location.replace(hash); // a browser that does not let pages from disk rewrite their address
  }
}
