// Reads what Python packed: a JSON object that says what is where, and one compressed block of arrays.

import { headName } from "./format.js";
import { readLenses } from "./columns.js";

// Half precision is read as its bits: not every browser has a Float16Array.
const TYPES = { float64: Float64Array, float32: Float32Array, float16: Uint16Array, uint8: Uint8Array };

function fromBase64(text) {
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
  const count = entry.shape.reduce((a, b) => a * b, 1);
  const Type = TYPES[entry.type];
  const width = Type.BYTES_PER_ELEMENT;
  const plain = new Uint8Array(count * width);
  for (let place = 0; place < width; place += 1) {
    const first = entry.first + place * count;
    for (let i = 0; i < count; i += 1) plain[i * width + place] = bytes[first + i];
  }
  const values = new Type(plain.buffer);
  return entry.type === "float16" ? Float32Array.from(values, fromHalf) : values;
}

// The number that these 16 bits stand for.
function fromHalf(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
  return bits & 0x8000 ? -size : size;
}

class Choice {
  constructor(array, key, categories) {
    this.key = key;
    for (const name of ["explained_variance", "r_q", "r_k", "n_q", "n_k", "window", "category"]) {
      this[name] = array(`${key}.${name}`);
    }
    // How sure component 0 is, by checkpoint and head; null where the tables have no errors.
    this.errors = Object.fromEntries(["explained_variance", "r_q", "r_k"].map((name) => [name, array(`${key}.${name}_se`)]));
    this.flags = Object.fromEntries(["unstable", "sign_sure", "category_share", "undecided", "sign_unknown"].map((name) => [name, array(`${key}.${name}`)]));
    const means = ["r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant", ...categories.map((c) => c.name)];
    this.depthErrors = Object.fromEntries(["r_q", "r_k"].map((name) => [name, array(`${key}.depth.${name}_se`)]));
    this.meanErrors = Object.fromEntries(means.map((name) => [name, array(`${key}.mean.${name}_se`)]));
  }
}

export class Data {
  constructor(about, bytes, fileBytes) {
    const array = (name) => (about.data.arrays[name] ? ungroup(bytes, about.data.arrays[name]) : null);
    const text = (name) => {
      const { first, shape } = about.data.arrays[name];
      return new TextDecoder().decode(bytes.subarray(first, first + shape[0]));
    };
    this.about = about;
    this.fileBytes = fileBytes;
    this.checkpoints = about.checkpoints;
    this.oneRun = about.oneRun; // only then do entries have an order and the same heads
    this.noun = about.noun; // what an entry is called
    this.Noun = about.noun[0].toUpperCase() + about.noun.slice(1);
    this.components = about.data.components;
    this.layers = about.data.layers;
    this.heads = about.data.heads;
    this.nHeads = this.heads.length;
    this.categories = about.categories;
    this.absent = about.data.absent;
    this.undefinedCode = about.categories.findIndex((category) => category.name === "undefined");
    this.texts = about.data.texts;
    this.choices = Object.fromEntries(about.data.choices.map((key) => [key, new Choice(array, key, about.categories)]));
    this.hasErrors = Object.values(this.choices).some((choice) => choice.errors.r_q);
    this.head = {};
    for (const name of ["depth", "kv_head", "rotary_dims", "head_dim", "attention_window", "depth_cell", "rotary", "attention", "layer_kind"]) {
      this.head[name] = array(`head.${name}`);
    }
    this.windows = about.data.windows.map(([checkpoint, size], row) => ({ checkpoint, size, row }));
    this.windowValues = {};
    this.windowErrors = {};
    if (this.windows.length) {
      for (const name of ["explained_variance", "r_q", "r_k", "category", "enough", "sign_sure"]) this.windowValues[name] = array(`windows.${name}`);
      for (const name of ["r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant", ...about.categories.map((c) => c.name)]) this.windowErrors[name] = array(`windows.${name}_se`);
    }
    this.provenance = text("provenance");
    this.byName = new Map(this.heads.map((head, h) => [headName(this.layers[h], head), h]));
    this.nLayers = Math.max(...this.layers, ...this.checkpoints.map((c) => (c.n_layers ?? 0) - 1)) + 1;
    this.nColumns = Math.max(...this.heads) + 1;
    this.lenses = readLenses(this, array);
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

export async function loadData() {
  const about = JSON.parse(document.getElementById("about").textContent);
  const packed = document.getElementById("pack");
  const bytes = await inflate(fromBase64(packed.textContent));
  // Nearly all of the file is ASCII, so letters are bytes.
  const parts = document.querySelectorAll("script, style");
  const fileBytes = Array.from(parts, (part) => part.textContent.length).reduce((a, b) => a + b, 0);
  packed.remove();
  return new Data(about, bytes, fileBytes);
}
