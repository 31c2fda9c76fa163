// Which checkpoints and which heads are meant: all filters and the brush, as one mask per checkpoint.
//
// Filters follow heads, not places: a category that is switched off leaves out the heads that were in it at that
// checkpoint, and every view shows what the others were before and became after. A box follows the heads that were in it
// where it was drawn. Different models have no common heads; there every model answers for itself.

import { correlation, plural, whole } from "./format.js";

const FILTERS = ["layers", "hidden", "brush", "component", "choice"];

export class Selection {
  constructor(data, store) {
    this.data = data;
    this.state = store.state;
    this.version = 0; // grows whenever a mask may have changed
    this.masks = new Map();
    store.subscribe((changed) => {
      const moved = changed.has("checkpoint") && this.state.hidden.unsure.length > 0;
      if (moved || FILTERS.some((key) => changed.has(key))) {
        this.version += 1;
        this.masks.clear();
      }
    });
  }

  // The checkpoints whose phase is not left out, in order.
  checkpoints() {
    const hidden = new Set(this.state.hidden.phase);
    const all = this.data.checkpoints.map((_, c) => c);
    return all.filter((c) => !hidden.has(this.data.checkpoints[c].phase ?? ""));
  }

  // 1 for every head of this checkpoint that is meant.
  mask(checkpoint) {
    if (!this.masks.has(checkpoint)) this.masks.set(checkpoint, this.#compute(checkpoint));
    return this.masks.get(checkpoint);
  }

  #compute(checkpoint) {
    const { data, state } = this;
    const mask = new Uint8Array(data.nHeads);
    const kinds = ["rotary", "attention"].map((what) => [what, new Set(state.hidden[what])]);
    const hiddenCategories = new Set(state.hidden.category.map((name) => data.categories.findIndex((c) => c.name === name)));
    const together = !data.oneRun;
    const here = together ? checkpoint : state.checkpoint;
    const choice = data.choices[state.choice];
    const own = data.row(checkpoint, state.component);
    const sorted = data.row(together ? checkpoint : (state.hidden.at ?? state.checkpoint), state.component);
    for (let h = 0; h < data.nHeads; h += 1) {
      const present = choice.category[own + h] !== data.absent;
      const inLayers = !state.layers || (data.layers[h] >= state.layers[0] && data.layers[h] <= state.layers[1]);
      const kept =
        present &&
        inLayers &&
        kinds.every(([what, hidden]) => !hidden.has(data.kind(what, checkpoint, h))) &&
        !hiddenCategories.has(choice.category[sorted + h]) &&
        !state.hidden.unsure.some((flag) => data.flag(flag, state, here, h) === 1) &&
        (!state.brush || this.inBrush(state.brush, h, together ? checkpoint : state.brush.checkpoint));
      mask[h] = kept ? 1 : 0;
    }
    return mask;
  }

  inBrush(brush, head, checkpoint) {
    const { data } = this;
    if (brush.kind === "cells") {
      const [layer, column] = [data.layers[head], data.heads[head]];
      return layer >= brush.layers[0] && layer <= brush.layers[1] && column >= brush.heads[0] && column <= brush.heads[1];
    }
    const choice = data.choices[brush.choice];
    const at = data.at(checkpoint, brush.component, head);
    const [q, k] = [choice.r_q[at], choice.r_k[at]];
    return q >= brush.r_q[0] && q <= brush.r_q[1] && k >= brush.r_k[0] && k <= brush.r_k[1];
  }

  count(checkpoint) {
    return this.mask(checkpoint).reduce((sum, kept) => sum + kept, 0);
  }

  // How many heads the checkpoint has at all.
  present(checkpoint) {
    const { data, state } = this;
    const start = data.row(checkpoint, state.component);
    let heads = 0;
    for (let h = 0; h < data.nHeads; h += 1) {
      heads += data.choices[state.choice].category[start + h] !== data.absent ? 1 : 0;
    }
    return heads;
  }

  get active() {
    return !this.allHeads || this.state.hidden.phase.length > 0;
  }

  // Whether no filter leaves out a head; phases choose checkpoints.
  get allHeads() {
    const { layers, brush, hidden } = this.state;
    return !layers && !brush && Object.entries(hidden).every(([what, list]) => what === "phase" || what === "at" || !list.length);
  }

  // The filters in words.
  words() {
    const { layers, brush, hidden } = this.state;
    const said = [];
    if (layers) said.push(layers[0] === layers[1] ? `layer ${layers[0]}` : `layers ${layers[0]} to ${layers[1]}`);
    for (const [what, noun] of [["category", ""], ["rotary", ""], ["attention", " attention"], ["unsure", " heads"], ["phase", ""]]) {
      const where = what === "category" && hidden.at !== null && this.data.oneRun ? ` (at ${this.data.checkpoints[hidden.at].label})` : "";
      if (hidden[what].length) said.push(`without ${hidden[what].map((name) => (what === "unsure" ? name.replaceAll("_", " ") : name || "unnamed")).join(", ")}${noun}${where}`);
    }
    if (brush) said.push(this.brushWords(brush));
    return said.join("; ");
  }

  brushWords(brush) {
    if (brush.kind === "cells") {
      return `layers ${brush.layers.join(" to ")}, heads ${brush.heads.join(" to ")}`;
    }
    const range = (name, [low, high]) => `${name} from ${correlation(Math.max(-1, low))} to ${correlation(Math.min(1, high))}`;
    const where = !this.data.oneRun ? "" : ` at ${this.data.checkpoints[brush.checkpoint].label}`;
    return `heads with ${range("r_q", brush.r_q)} and ${range("r_k", brush.r_k)}${where}`;
  }

  title() {
    const { checkpoint } = this.state;
    const all = this.present(checkpoint);
    const kept = this.count(checkpoint);
    return this.active ? `${whole(kept)} of ${plural(all, "head")}` : `all ${plural(all, "head")}`;
  }
}
