// What a head does, in words: which keys its late queries favour, whether that exceeds its error, and what is not sure.

import { correlation } from "./format.js";
import { outcome, significant, withError } from "./numbers.js";
import { unsure } from "./sure.js";

// On the component that is shown: who follows position.
function followWords(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  const at = data.at(checkpoint, component, head);
  const { r_q: q, r_k: k } = data.choices[choice];
  const { low, high } = data.about.thresholds;
  const how = (value) => (Math.abs(value) > high ? "closely" : Math.abs(value) > low ? "loosely" : "hardly");
  if (!Number.isFinite(q[at] + k[at])) return "Its correlation with position is undefined here.";
  const against = k[at] < -low ? "; keys run against it" : "";
  return `Queries follow position ${how(q[at])} (r_q ${correlation(q[at])}), keys ${how(k[at])} (r_k ${correlation(k[at])})${against}.`;
}

// Whether late queries favour late or early keys, against the spread of a query's scores.
function favourWords(app, head) {
  const { data, store } = app;
  const column = data.columns.get("late_advantage");
  if (!column?.isAt(store.state)) return "";
  const { checkpoint } = store.state;
  const [value, error] = [column.at(store.state, checkpoint, head), column.errorAt(store.state, checkpoint, head)];
  if (!Number.isFinite(value)) return "";
  const amount = `${withError(Math.abs(value), error, { plain: (number) => significant(number, 3) })}${Number.isFinite(error) ? "" : " (error not known)"} standard deviations of a query’s scores`;
  const found = outcome(value, error, data.about.critical[checkpoint]);
  if (found !== "changed") return `Whether its late queries favour late or early keys is ${found === "unchanged" ? "not significant" : "unknown"} (${amount}).`;
  return `Its late queries favour ${value > 0 ? "late" : "early"} keys: from the first key to the last the score ${value > 0 ? "rises" : "falls"} by ${amount}.`;
}

// PC0 is one direction; where another one follows position more closely, that is said.
function strongestWords(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  if (data.components.length < 2) return "";
  const size = (p) => Math.abs(data.choices[choice].r_q[data.at(checkpoint, p, head)]);
  const best = data.components.map((_, p) => p).filter((p) => Number.isFinite(size(p))).sort((a, b) => size(b) - size(a))[0];
  if (best === undefined || best === component) return "";
  const share = data.choices[choice].explained_variance[data.at(checkpoint, best, head)];
  return `Queries follow position most closely on PC${data.components[best]} (|r_q| ${correlation(size(best))}, ${Math.round(100 * share)}% of the variance).`;
}

// How far the nearest threshold is, where crossing it would change the category.
function thresholdWords(app, head) {
  const { data, store } = app;
  const said = unsure(data, store.state, store.state.checkpoint, head);
  return said.length ? `Not sure: ${said.join("; ")}.` : "";
}

export function inWords(app, head) {
  return [followWords(app, head), favourWords(app, head), strongestWords(app, head), thresholdWords(app, head)].filter(Boolean).join(" ");
}
