// Means, spreads and shares over the heads that are meant. The same definitions as in Python's `lenses/position` and
// `lenses/taxonomy`: means leave out what is undefined, spreads are n - 1, shares are of all heads.

export function meanAndSpread(values) {
  let count = 0;
  let sum = 0;
  for (const value of values) {
    if (Number.isFinite(value)) {
      count += 1;
      sum += value;
    }
  }
  const mean = count ? sum / count : NaN;
  let squares = 0;
  for (const value of values) {
    if (Number.isFinite(value)) squares += (value - mean) ** 2;
  }
  return { mean, spread: count > 1 ? Math.sqrt(squares / (count - 1)) : NaN, count };
}

// What is known about one line of heads. `source` holds arrays that start at `start`. A head whose sign is not sure is
// neither concordant nor discordant.
export function summarise(data, source, start, mask, signUnsure = () => false) {
  const chosen = [];
  for (let h = 0; h < data.nHeads; h += 1) {
    if (mask[h] && source.category[start + h] !== data.absent) chosen.push(start + h);
  }
  const pick = (name) => chosen.map((i) => source[name][i]);
  const counts = data.categories.map(() => 0);
  for (const i of chosen) counts[source.category[i]] += 1;
  const { concordance } = data.about.thresholds;
  const keys = pick("r_k");
  const sure = chosen.filter((i) => !signUnsure(i - start)).map((i) => source.r_k[i]);
  const share = (test) => (chosen.length ? sure.filter(test).length / chosen.length : NaN);
  const defined = keys.filter(Number.isFinite);
  const part = (test) => (defined.length ? sure.filter(test).reduce((a, b) => a + b, 0) / defined.length : NaN);
  return {
    heads: chosen.length,
    r_q: meanAndSpread(pick("r_q")),
    r_k: meanAndSpread(keys),
    r_k_abs: meanAndSpread(keys.map(Math.abs)),
    explained_variance: meanAndSpread(pick("explained_variance")),
    counts,
    against: chosen.filter((i) => source.category[i] === 0 && source.r_k[i] < 0).length, // of the position-dominated
    shares: counts.map((count) => (chosen.length ? count / chosen.length : NaN)),
    concordant: share((k) => k > concordance),
    discordant: share((k) => k < -concordance),
    // mean r_k is the sum of these two and of a small rest
    concordantPart: part((k) => k > concordance),
    discordantPart: part((k) => k < -concordance),
  };
}

// Summaries per checkpoint, kept until the selection changes.
export class Summaries {
  constructor(data, store, selection) {
    Object.assign(this, { data, state: store.state, selection, kept: new Map(), version: -1 });
  }

  at(checkpoint, options = {}) {
    const { choice = this.state.choice, component = this.state.component, kind = null } = options;
    if (this.version !== this.selection.version) {
      this.kept.clear();
      this.version = this.selection.version;
    }
    const key = `${choice} ${component} ${checkpoint} ${kind}`;
    if (!this.kept.has(key)) {
      const mask = this.#only(this.selection.mask(checkpoint), checkpoint, kind);
      const unsure = (h) => this.data.flag("sign_sure", { choice, component }, checkpoint, h) === 0;
      this.kept.set(key, summarise(this.data, this.data.choices[choice], this.data.row(checkpoint, component), mask, unsure));
    }
    return this.kept.get(key);
  }

  // Where the middle half of the heads begins and ends; null for fewer than four.
  middleHalf(checkpoint, name, { choice, kind }) {
    const summary = this.at(checkpoint, { choice, kind });
    summary.halves ??= {};
    if (summary.halves[name] === undefined) {
      const mask = this.#only(this.selection.mask(checkpoint), checkpoint, kind);
      const start = this.data.row(checkpoint, this.state.component);
      const known = this.data.choices[choice][name].slice(start, start + this.data.nHeads).filter((value, h) => mask[h] && Number.isFinite(value)).sort();
      const at = (share) => known[Math.min(known.length - 1, Math.round(share * (known.length - 1)))];
      summary.halves[name] = known.length > 3 ? [at(0.25), at(0.75)] : null;
    }
    return summary.halves[name];
  }

  #only(mask, checkpoint, kind) {
    if (kind === null) return mask;
    return mask.map((kept, h) => (kept && this.data.kind("layer_kind", checkpoint, h) === kind ? 1 : 0));
  }

  // The error over documents of a mean or share over all heads on PC0; NaN for a selection, which Python did not compute.
  error(checkpoint, name, { choice = this.state.choice, component = this.state.component } = {}) {
    const errors = this.data.choices[choice].meanErrors[name];
    return errors && this.selection.allHeads && this.data.components[component] === 0 ? errors[checkpoint] : NaN;
  }

  // The error over documents of the difference of a mean or share between two checkpoints. Paired where both read the
  // same documents: what these do to both cancels. Else as if they were different documents.
  differenceError(from, to, name) {
    const unpaired = Math.hypot(this.error(from, name), this.error(to, name));
    const drawn = this.data.choices[this.state.choice].drawn[name];
    if (!drawn || !Number.isFinite(unpaired)) return { error: unpaired, paired: false };
    const groups = drawn.length / this.data.checkpoints.length;
    const apart = Array.from({ length: groups }, (_, i) => drawn[to * groups + i] - drawn[from * groups + i]);
    const mean = apart.reduce((sum, each) => sum + each, 0) / groups;
    const error = Math.sqrt(apart.reduce((sum, each) => sum + (each - mean) ** 2, 0) / groups);
    return Number.isFinite(error) ? { error, paired: true } : { error: unpaired, paired: false };
  }

  // The error of a mean in one kind of layer.
  kindError(checkpoint, name, kind, choice) {
    const place = this.data.about.layerKinds.indexOf(kind);
    const errors = this.data.choices[choice].kindErrors[place]?.[name];
    return errors && this.selection.allHeads && this.data.components[this.state.component] === 0 ? errors[checkpoint] : NaN;
  }

  window(entry) {
    const start = entry.row * this.data.nHeads;
    const { sign_sure: sure } = this.data.windowValues;
    return summarise(this.data, this.data.windowValues, start, this.selection.mask(entry.checkpoint), (h) => sure?.[start + h] === 0);
  }

  // The error over documents of a mean by depth; NaN for a selection, as above, and where depth has other cells.
  depthError(checkpoint, statistic, cell) {
    const { data, state } = this;
    const errors = data.choices[state.choice].depthErrors[statistic];
    const cells = data.about.depth.columns.length;
    if (!errors || errors.length !== cells * data.checkpoints.length || !this.selection.allHeads || data.components[state.component] !== 0) return NaN;
    return errors[checkpoint * cells + cell];
  }

  // The error over documents at one window; NaN for a selection, as above.
  windowError(entry, name) {
    const errors = this.data.windowErrors[name];
    return errors && this.selection.allHeads ? errors[entry.row] : NaN;
  }

  // Heads that went from each category to each: counts[from][to], over heads that both checkpoints have.
  flow(before, after) {
    const { data, state } = this;
    const { category } = data.choices[state.choice];
    const [one, other] = [data.row(before, state.component), data.row(after, state.component)];
    const [kept, keptAfter] = [this.selection.mask(before), this.selection.mask(after)];
    const counts = data.categories.map(() => data.categories.map(() => 0));
    for (let h = 0; h < data.nHeads; h += 1) {
      if (kept[h] && keptAfter[h]) counts[category[one + h]][category[other + h]] += 1;
    }
    return counts;
  }

  // Mean of a statistic per depth cell (bin or layer); NaN where the cell has no head.
  depth(checkpoint, statistic) {
    const { data, state } = this;
    const cells = data.about.depth.columns.length;
    const [sums, counts] = [new Float64Array(cells), new Float64Array(cells)];
    const values = data.choices[state.choice][statistic];
    const start = data.row(checkpoint, state.component);
    const mask = this.selection.mask(checkpoint);
    for (let h = 0; h < data.nHeads; h += 1) {
      const value = values[start + h];
      const cell = data.number("depth_cell", checkpoint, h);
      if (mask[h] && Number.isFinite(value) && cell < cells) {
        sums[cell] += value;
        counts[cell] += 1;
      }
    }
    return Array.from(sums, (sum, cell) => (counts[cell] ? sum / counts[cell] : NaN));
  }
}
