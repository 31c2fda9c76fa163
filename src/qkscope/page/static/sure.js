// How sure a head is, in words. What counts as unsure was decided in Python.

import { estimate } from "./numbers.js";
import { percent } from "./format.js";

const NUMBERS = [["r_q", "r_q"], ["r_k", "r_k"], ["explained variance", "explained_variance"]];

// A head's numbers, each with its error over documents where that is known: pairs of a name and a text.
export function estimates(data, state, checkpoint, head) {
  const at = data.at(checkpoint, state.component, head);
  return NUMBERS.map(([text, name]) => [text, estimate(data.choices[state.choice][name][at], data.error(name, state, checkpoint, head))]);
}

// What a filter can leave out: the flag, and what it is called.
export const UNSURE = [["unstable", "unstable component"], ["undecided", "undecided category"], ["sign_unknown", "unknown sign of r_k"]];

// What another sample of documents might change about a head; empty where nothing, or where errors are not known.
export function unsure(data, state, checkpoint, head) {
  const flag = (name) => data.flag(name, state, checkpoint, head);
  const said = [];
  if (flag("undecided") === 1) said.push("undecided: another category is within the confidence interval");
  if (flag("unstable") === 1) said.push("unstable: the component is not distinguishable from the next");
  if (flag("sign_sure") === 0) said.push("the sign of r_k is uncertain");
  return said;
}

// Where a head came from, as [r_q, r_k]: turned round where its sign is not known at either end and only the sign differs.
export function cameFrom(data, state, from, to, head) {
  const { r_q: q, r_k: k } = data.choices[state.choice];
  const [a, b] = [data.at(from, state.component, head), data.at(to, state.component, head)];
  const turnable = [from, to].some((c) => data.flag("sign_unknown", state, c, head) === 1);
  return turnable && k[a] * k[b] < 0 ? [-q[a], -k[a]] : [q[a], k[a]];
}

// The same for a head that is read by itself: also how many samples agree.
export function sureness(data, state, checkpoint, head) {
  const share = data.flag("category_share", state, checkpoint, head);
  if (!Number.isFinite(share)) return "standard errors are not known";
  return [`${percent(share)} of other samples of documents give this category`, ...unsure(data, state, checkpoint, head)].join("; ");
}
