// What a head does, in words: how closely it tracks position, which keys it prefers, and what is uncertain.

import { correlation } from "./format.js";
import { outcome, significant, withError } from "./numbers.js";
import { unsure } from "./sure.js";

// On the component that is shown: what tracks position.
function followWords(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  const at = data.at(checkpoint, component, head);
  const { r_q: q, r_k: k } = data.choices[choice];
  const { low, high } = data.about.thresholds;
  const how = (value) => (Math.abs(value) > high ? "closely" : Math.abs(value) > low ? "loosely" : "barely");
  if (!Number.isFinite(q[at] + k[at])) return "Its correlation with position is undefined here.";
  const keys = k[at] < -low ? "track it in reverse" : `${how(k[at])} track it`;
  return `Queries ${how(q[at])} track position (r_q ${correlation(q[at])}); keys ${keys} (r_k ${correlation(k[at])}).`;
}

// Whether late queries prefer late or early keys, in standard deviations of a query's scores.
function favourWords(app, head) {
  const { data, store } = app;
  const column = data.columns.get("late_advantage");
  if (!column?.isAt(store.state)) return "";
  const { checkpoint } = store.state;
  const [value, error] = [column.at(store.state, checkpoint, head), column.errorAt(store.state, checkpoint, head)];
  if (!Number.isFinite(value)) return "";
  const which = outcome(value, error, data.about.critical[checkpoint]);
  if (which === "unchanged") return `No significant preference for late or early keys (${withError(value, error)} SD).`;
  const unknown = which === "unknown" ? " (standard error not known)" : "";
  return `${value > 0 ? "Later" : "Earlier"} keys score ${significant(Math.abs(value), 2)} SD higher${unknown}.`;
}

// PC0 is one direction; another one may track position more closely.
function strongestWords(app, head) {
  const { data, store } = app;
  const { checkpoint, component, choice } = store.state;
  if (data.components.length < 2) return "";
  const size = (p) => Math.abs(data.choices[choice].r_q[data.at(checkpoint, p, head)]);
  const best = data.components.map((_, p) => p).filter((p) => Number.isFinite(size(p))).sort((a, b) => size(b) - size(a))[0];
  if (best === undefined || best === component) return "";
  const share = data.choices[choice].explained_variance[data.at(checkpoint, best, head)];
  return `Queries track position most closely on PC${data.components[best]} (|r_q| ${correlation(size(best))}, ${Math.round(100 * share)}% of the variance).`;
}

// How far the nearest threshold is, where crossing it would change the category.
function thresholdWords(app, head) {
  const { data, store } = app;
  const said = unsure(data, store.state, store.state.checkpoint, head);
  return said.length ? `Uncertain: ${said.join("; ")}.` : "";
}

export function inWords(app, head) {
  return [followWords(app, head), favourWords(app, head), strongestWords(app, head), thresholdWords(app, head)].filter(Boolean).join(" ");
}
