// Reads what Python packed: a JSON object that says what is where, and one compressed block of arrays.

import { headName } from "./format.js";
import { lazily, lazyTable } from "./lazy.js";
import { readLenses } from "./columns.js";

// Half precision is read as its bits: not every browser has a Float16Array. Nothing is decoded before it is first read.
const TYPES = { float64: Float64Array, float32: Float32Array, float16: Uint16Array, uint8: Uint8Array, log8: Uint8Array, lin8: Uint8Array };

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // browsers of 2025
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Python put all first bytes of an array together, then all second bytes, and so on.
function ungroup(bytes, entry) {
  const shape = entry.lines ? [entry.lines.length, ...entry.shape.slice(1)] : entry.shape;
  const count = shape.reduce((a, b) => a * b, 1);
  const Type = TYPES[entry.type];
  const width = Type.BYTES_PER_ELEMENT;
  const plain = new Uint8Array(count * width);
  for (let place = 0; place < width; place += 1) {
    const first = entry.first + place * count;
    for (let i = 0; i < count; i += 1) plain[i * width + place] = bytes[first + i];
  }
  const values = new Type(plain.buffer);
  if (entry.type === "float16") return fromHalves(values);
  return entry.type === "log8" ? fromLogs(values, entry) : values;
}

// One byte on a logarithmic scale: 0 is undefined, 1 is 0.
function fromLogs(codes, { low, high, steps }) {
  const known = Float32Array.from({ length: 256 }, (_, code) => (code === 0 ? NaN : code === 1 ? 0 : 10 ** (low + ((code - 2) / steps) * (high - low))));
  const values = new Float32Array(codes.length);
  for (let i = 0; i < codes.length; i += 1) values[i] = known[codes[i]];
  return values;
}

// One byte on a straight scale from the smallest to the largest number of its line: 0 is undefined.
function fromLines(codes, ends, length) {
  return Float32Array.from(codes, (code, i) => {
    const [low, high] = ends.subarray(2 * Math.floor(i / length));
    return code === 0 ? NaN : low + ((code - 1) / 254) * (high - low);
  });
}

// Arrays and texts by name; an array that repeats lines of another one takes them from there.
function reader(index, bytes) {
  const array = (name) => {
    const entry = index[name];
    if (!entry) return null;
    const values = ungroup(bytes, entry);
    if (entry.type === "lin8") return fromLines(values, array(`${name}.ends`), entry.shape.at(-1));
    if (!entry.lines) return values;
    const whole = array(entry.like).slice();
    const length = whole.length / entry.shape[0];
    entry.lines.forEach((line, i) => whole.set(values.subarray(i * length, (i + 1) * length), line * length));
    return whole;
  };
  const text = (name) => {
    const { first, shape } = index[name];
    return new TextDecoder().decode(bytes.subarray(first, first + shape[0]));
  };
  return { array, text, has: (name) => name in index };
}

// A large study has its first component and the others apart: (checkpoint, component, head) put together again.
function withRest(first, rest, [checkpoints, components, heads]) {
  if (!rest) return first;
  const whole = new Float32Array(checkpoints * components * heads);
  for (let c = 0; c < checkpoints; c += 1) {
    whole.set(first.subarray(c * heads, (c + 1) * heads), c * components * heads);
    whole.set(rest.subarray(c * (components - 1) * heads, (c + 1) * (components - 1) * heads), (c * components + 1) * heads);
  }
  return whole;
}

// The numbers that these 16 bits each stand for: sign, exponent and fraction moved to where single precision has them.
function fromHalves(halves) {
  const values = new Float32Array(halves.length);
  const bits = new Uint32Array(values.buffer);
  for (let i = 0; i < halves.length; i += 1) {
    const sign = (halves[i] & 0x8000) << 16;
    const rest = halves[i] & 0x7fff;
    if (rest >= 0x7c00) bits[i] = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    else if (rest >= 0x400) bits[i] = sign | ((rest + 0x1c000) << 13);
    else values[i] = (sign ? -1 : 1) * rest * 2 ** -24;
  }
  return values;
}

class Choice {
  constructor({ array, has }, key, { categories, layerKinds }, shape) {
    this.key = key;
    for (const name of ["r_q", "r_k", "category"]) this[name] = this.#whole(array, name, shape); // what every view reads
    for (const name of ["explained_variance", "n_q", "n_k", "window"]) lazily(this, name, () => this.#whole(array, name, shape));
    // How sure component 0 is, by checkpoint and head; null where the tables have no errors.
    this.hasErrors = has(`${key}.r_q_se`);
    this.errors = lazyTable(["explained_variance", "r_q", "r_k"], (name) => array(`${key}.${name}_se`));
    this.flags = lazyTable(["unstable", "sign_sure", "category_share", "undecided", "sign_unknown"], (name) => array(`${key}.${name}`));
    const means = ["r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant", ...categories.map((c) => c.name)];
    this.depthErrors = lazyTable(["r_q", "r_k"], (name) => array(`${key}.depth.${name}_se`));
    this.kindErrors = layerKinds.map((_, i) => lazyTable(["r_q", "r_k"], (name) => array(`${key}.kind.${i}.${name}_se`)));
    this.meanErrors = lazyTable(means, (name) => array(`${key}.mean.${name}_se`));
    // Of differences between checkpoints that read the same documents: draws of means, and errors of single heads.
    this.drawn = lazyTable(means, (name) => array(`${key}.drawn.${name}`));
    this.changeErrors = lazyTable(["r_q", "r_k"], (name) => array(`${key}.change.${name}_se`));
  }

  #whole(array, name, shape) {
    return withRest(array(`${this.key}.${name}`), array(`${this.key}.${name}.rest`), shape);
  }
}

export class Data {
  constructor(about, bytes, fileBytes) {
    const read = reader(about.data.arrays, bytes);
    const { array } = read;
    this.about = about;
    this.fileBytes = fileBytes;
    this.checkpoints = about.checkpoints;
    this.oneRun = about.oneRun; // only then do entries have an order and the same heads
    this.noun = about.noun; // what an entry is called
    this.atOrIn = about.oneRun ? "at" : "in"; // a checkpoint is a moment, a model a thing
    this.Noun = about.noun[0].toUpperCase() + about.noun.slice(1);
    this.components = about.data.components;
    this.layers = about.data.layers;
    this.heads = about.data.heads;
    this.nHeads = this.heads.length;
    this.categories = about.categories;
    this.absent = about.data.absent;
    this.undefinedCode = about.categories.findIndex((category) => category.name === "undefined");
    this.texts = about.data.texts;
    const shape = [about.checkpoints.length, about.data.components.length, about.data.heads.length];
    this.choices = Object.fromEntries(about.data.choices.map((key) => [key, new Choice(read, key, about, shape)]));
    this.hasErrors = Object.values(this.choices).some((choice) => choice.hasErrors);
    this.head = lazyTable(["depth", "kv_head", "rotary_dims", "head_dim", "attention_window", "depth_cell", "rotary", "attention", "layer_kind"], (name) => array(`head.${name}`));
    this.windows = about.data.windows.map(([checkpoint, size], row) => ({ checkpoint, size, row }));
    this.windowValues = lazyTable(["explained_variance", "r_q", "r_k", "category", "enough", "sign_sure"], (name) => array(`windows.${name}`));
    this.windowErrors = lazyTable(["r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant", ...about.categories.map((c) => c.name)], (name) => array(`windows.${name}_se`));
    this.byName = new Map(this.heads.map((head, h) => [headName(this.layers[h], head), h]));
    this.nLayers = Math.max(...this.layers, ...this.checkpoints.map((c) => (c.n_layers ?? 0) - 1)) + 1;
    this.nColumns = Math.max(...this.heads) + 1;
    this.columnLines = new Map(about.data.columnsAt.map((checkpoint, line) => [checkpoint, line])); // of columns of lenses
    this.lenses = readLenses(this, read);
    // Every column of every lens by name; a name that two lenses use stands for the first.
    this.columns = new Map(this.lenses.flatMap((lens) => lens.listed.map((column) => [column.name, column])).reverse());
    this.measures = new Set(["category", "r_q", "r_k", ...this.columns.keys()]); // what colours the map can show
    this.axes = axesOf(this.checkpoints);
  }

  at(checkpoint, component, head) {
    return (checkpoint * this.components.length + component) * this.nHeads + head;
  }

  // Where the lines of one checkpoint and component begin in every array of a choice.
  row(checkpoint, component) {
    return this.at(checkpoint, component, 0);
  }

  name(head) {
    return headName(this.layers[head], this.heads[head]);
  }

  // Where a sentence is: "at S1-40K" of a run, "in Gemma" of models.
  place(checkpoint) {
    return `${this.atOrIn} ${this.checkpoints[checkpoint].label}`;
  }

  // What kind of layer a head is in, as text: "rotary", "full", ...
  kind(what, checkpoint, head) {
    return this.texts[what][this.head[what][checkpoint * this.nHeads + head]] ?? "";
  }

  number(what, checkpoint, head) {
    return this.head[what][checkpoint * this.nHeads + head];
  }

  // The standard error over documents of a head's number; NaN where it is not known, as on all components but 0.
  error(name, { choice, component }, checkpoint, head) {
    return this.#sure(this.choices[choice].errors[name], component, checkpoint, head);
  }

  // How sure a head is: unstable, sign_sure, undecided, sign_unknown (1 or 0), category_share; NaN where that is not known.
  flag(name, { choice, component }, checkpoint, head) {
    return this.#sure(this.choices[choice].flags[name], component, checkpoint, head);
  }

  #sure(values, component, checkpoint, head) {
    return values && this.components[component] === 0 ? values[checkpoint * this.nHeads + head] : NaN;
  }

  // The paired error of a head's change from one checkpoint to another on PC0; NaN where it is not known.
  changeError(name, { choice, component }, from, to, head) {
    const errors = this.choices[choice].changeErrors[name];
    const place = this.about.data.changes.findIndex(([a, b]) => (a === from && b === to) || (a === to && b === from));
    return errors && place >= 0 && this.components[component] === 0 ? errors[place * this.nHeads + head] : NaN;
  }

  // What a category is called: off component 0 no head is "content-focused", it only has no position there.
  categoryName(code, component) {
    const { name } = this.categories[code] ?? { name: "not measured" };
    const pc = `PC${this.components[component]}`;
    if (this.components[component] === 0) return name;
    const neutral = { "position-dominated": "queries and keys track position", "Q-positional": "queries track position", "K-positional": "keys track position", "content-focused": "no position", mixed: "some position" };
    return neutral[name] ? `${neutral[name]} on ${pc}` : name;
  }

  // Whether a head is position-dominated with keys that run against position.
  runsAgainst(choice, at) {
    const source = this.choices[choice];
    return source.category[at] === 0 && source.r_k[at] < 0;
  }

  // What is unpacked when it is first needed: details of heads, cards, provenance.
  later() {
    this.unpacked ??= unpackLater(this.about);
    return this.unpacked;
  }

  // The window of a checkpoint in a choice: that of the first head it has.
  window(choice, checkpoint) {
    const start = this.row(checkpoint, 0);
    for (let h = 0; h < this.nHeads; h += 1) {
      const value = this.choices[choice].window[start + h];
      if (Number.isFinite(value)) return value;
    }
    return NaN;
  }
}

// How checkpoints can stand along x: in order, or where training is a number that only grows, by that number.
function axesOf(checkpoints) {
  const found = ["order"];
  for (const key of ["step", "trained_tokens"]) {
    const values = checkpoints.map((c) => c[key]);
    const grows = values.every((value, i) => Number.isFinite(value) && (i === 0 || value > values[i - 1]));
    if (values.length > 1 && grows) found.push(key, ...(values[0] > 0 ? [`log ${key}`] : []));
  }
  return found;
}

// Profiles, score maps, kernels, plasticity and kept tokens: rows of a head (or of a layer) at a checkpoint.
class Details {
  constructor({ checkpoints, tables }, { array, text }, layers) {
    Object.assign(this, { checkpoints, tables, array, text, layers, kept: new Map() });
  }

  #values(key, read = this.array) {
    if (!this.kept.has(key)) this.kept.set(key, read(key));
    return this.kept.get(key);
  }

  // Lists by column, each with a value per place; null where there are none. A checkpoint whose own context is the
  // common window has its rows under `own`.
  rows(name, choice, checkpoint, unit) {
    const table = this.tables[name];
    const from = [choice, "own"].find((each) => table?.[each]?.includes(checkpoint));
    if (!from) return null;
    const line = table[from].indexOf(checkpoint);
    const length = this.#places(name, from);
    const read = (column, place) => {
      const values = this.#values(`${name}.${from}.${column}`);
      if (!values) return [column, null];
      const start = (line * (values.length / table[from].length / length) + place) * length;
      const numbers = Array.from(values.subarray(start, start + length));
      return [column, table.texts?.includes(column) ? this.#words(`${name}.${from}.${column}`, numbers) : numbers];
    };
    const ofLayer = (table.ofLayer ?? []).map((column) => read(column, this.layers[unit]));
    return Object.fromEntries([...table.shared.map((column) => read(column, 0)), ...ofLayer, ...table.columns.map((column) => read(column, unit))]);
  }

  // What codes stand for; empty where there is none.
  #words(key, codes) {
    const words = this.#values(`${key}.words`, (name) => JSON.parse(this.text(name)));
    return codes.map((code) => words[code] ?? "");
  }

  #places(name, choice) {
    const table = this.tables[name];
    return this.#values(`${name}.${choice}.${table.shared[0]}`).length / table[choice].length;
  }
}

async function unsqueeze(text) {
  return JSON.parse(new TextDecoder().decode(await inflate(fromBase64(text))));
}

async function unpackLater(about) {
  const node = document.getElementById("later");
  const packed = node.textContent;
  const { array, text } = reader(await unsqueeze(about.data.later), packed ? await inflate(fromBase64(packed)) : new Uint8Array());
  node.remove();
  return { details: new Details(about.data.detail, { array, text }, about.data.layers), cards: () => JSON.parse(text("cards")), provenance: () => text("provenance") };
}

export async function loadData() {
  const about = JSON.parse(document.getElementById("about").textContent);
  const packed = document.getElementById("pack");
  const bytes = await inflate(fromBase64(packed.textContent));
  about.data.arrays = await unsqueeze(about.data.arrays);
  Object.assign(about, await unsqueeze(about.long));
  // Nearly all of the file is ASCII, so letters are bytes.
  const parts = document.querySelectorAll("script, style");
  const fileBytes = Array.from(parts, (part) => part.textContent.length).reduce((a, b) => a + b, 0);
  packed.remove();
  return new Data(about, bytes, fileBytes);
}
