// The columns of lenses: a number for each head, with its definition, as Python declared it.

import { lazily } from "./lazy.js";
import { extent, withError } from "./numbers.js";

const ERROR = "_se";

class LensColumn {
  constructor(data, name, spec, { array, has }) {
    Object.assign(this, { data, name, ...spec, values: {}, errors: {}, meanErrors: {} });
    const key = (choice) => `lens.${spec.table}.${choice}.${name}`;
    const choices = Object.keys(data.choices);
    this.measured = new Set(choices.filter((choice) => has(key(choice))));
    for (const choice of choices) {
      lazily(this.values, choice, () => array(key(choice)));
      lazily(this.errors, choice, () => (spec.error ? array(`${key(choice)}${ERROR}`) : null));
      lazily(this.meanErrors, choice, () => array(`${key(choice)}.mean${ERROR}`));
    }
    // Over all checkpoints and windows, so that axes and colours stay when the slider moves.
    lazily(this, "range", () => Object.values(this.values).reduce((range, values) => extent(values ?? [], range), null));
  }

  get label() {
    return this.unit ? `${this.title} (${this.unit})` : this.title;
  }

  // Whether it was measured at the window that the page shows.
  isAt(state) {
    return this.measured.has(state.choice);
  }

  #read(values, component, checkpoint, head) {
    const { data } = this;
    const line = data.columnLines.get(checkpoint);
    if (!values || line === undefined) return NaN;
    const perHead = values.length === data.columnLines.size * data.nHeads;
    return values[perHead ? line * data.nHeads + head : data.at(line, component, head)];
  }

  at({ choice, component }, checkpoint, head) {
    return this.#read(this.values[choice], component, checkpoint, head);
  }

  errorAt({ choice, component }, checkpoint, head) {
    return this.#read(this.errors[choice], component, checkpoint, head);
  }

  // The error over documents of the mean over all heads; NaN where Python did not compute it.
  meanErrorAt({ choice }, checkpoint) {
    return this.meanErrors[choice]?.[checkpoint] ?? NaN;
  }

  // A value, its error and its unit.
  text(state, checkpoint, head) {
    if (!this.isAt(state)) return "not measured at this window";
    if (!this.data.columnLines.has(checkpoint)) return `not in this file ${this.data.place(checkpoint)}`;
    const value = this.at(state, checkpoint, head);
    const text = withError(value, this.errorAt(state, checkpoint, head));
    return this.unit && Number.isFinite(value) ? `${text} ${this.unit}` : text;
  }
}

// All lenses of the page: each with its columns by name, those that a head lists (errors stand beside their values),
// and its views over columns.
export function readLenses(data, read) {
  return (data.about.lenses ?? []).map((lens) => {
    const columns = Object.fromEntries(Object.entries(lens.columns).map(([name, spec]) => [name, new LensColumn(data, name, spec, read)]));
    const isError = (name) => name.endsWith(ERROR) && columns[name.slice(0, -ERROR.length)]?.error;
    const listed = Object.values(columns).filter((column) => !isError(column.name));
    return { ...lens, columns, listed, views: lens.views.map((view) => ({ ...view, columns: view.columns.map((name) => columns[name]) })) };
  });
}

// A statistic of qk.csv in the shape of a lens's column, so that the same views can show it.
export class StatisticColumn {
  constructor(data, name, definition) {
    Object.assign(this, { data, name, title: name, definition, unit: "", color: "", limits: [-1, 1], error: true, label: name, range: [name === "r_q" ? 0 : -1, 1] });
  }

  isAt() {
    return true;
  }

  at({ choice, component }, checkpoint, head) {
    return this.data.choices[choice][this.name][this.data.at(checkpoint, component, head)];
  }

  errorAt(state, checkpoint, head) {
    return this.data.error(this.name, state, checkpoint, head);
  }

  text(state, checkpoint, head) {
    return withError(this.at(state, checkpoint, head), this.errorAt(state, checkpoint, head));
  }
}

// What a view says where a large study has the columns of lenses for some checkpoints only; empty where it has them here.
export function keptWords({ data, store }) {
  const { size } = data.columnLines;
  return data.columnLines.has(store.state.checkpoint) ? "" : `This file has these measures for ${size} of ${data.checkpoints.length} ${data.noun}s, not for this one. `;
}

// What a reader wants to know about a head: its place, and these columns.
export function columnLines(columns) {
  return (app, head, checkpoint) => {
    const { data, store } = app;
    const { choice, component } = store.state;
    const there = data.choices[choice].category[data.at(checkpoint, component, head)] !== data.absent;
    if (!there) return [data.name(head), `not measured ${data.place(checkpoint)}`];
    return [`Layer ${data.layers[head]}, head ${data.heads[head]}`, ...columns.map((c) => `${c.title} ${c.text(store.state, checkpoint, head)}`)];
  };
}

// The shown heads of the checkpoint on the slider, with these columns and their errors, as a table.
export function columnTable(app, columns) {
  const { data, store, selection } = app;
  const { checkpoint, choice } = store.state;
  const mask = selection.mask(checkpoint);
  const digits = (value, n) => (Number.isFinite(value) ? Number(value.toPrecision(n)) : NaN); // what single and half precision hold
  const heads = Array.from(mask.keys()).filter((h) => mask[h]);
  const numbers = (c, h) => [digits(c.at(store.state, checkpoint, h), 7), ...(c.error ? [digits(c.errorAt(store.state, checkpoint, h), 3)] : [])];
  return {
    columns: ["model", "layer", "head", "window", ...columns.flatMap((c) => [c.name, ...(c.error ? [`${c.name}${ERROR}`] : [])])],
    rows: heads.map((h) => [data.checkpoints[checkpoint].name, data.layers[h], data.heads[h], data.window(choice, checkpoint), ...columns.flatMap((c) => numbers(c, h))]),
  };
}
