// The numbers themselves: the heads of a checkpoint as a table, and every table as CSV.

import { button, element, named } from "./dom.js";
import { estimate } from "./numbers.js";
import { fileName, percent, plural, whole } from "./format.js";
import { saveCsv } from "./download.js";
import { swatchOf } from "./swatch.js";

const PAGE = 20;
const HEAD_COLUMNS = ["model", "layer", "depth", "head", "kv_head", "pc", "explained_variance", "r_q", "r_k", "n_q", "n_k", "rotary", "rotary_dims", "head_dim", "attention", "attention_window", "window", "category"];

function headRow(data, choice, checkpoint, component, h) {
  const at = data.at(checkpoint, component, h);
  const source = data.choices[choice];
  const number = (name) => data.number(name, checkpoint, h);
  return [
    data.checkpoints[checkpoint].name, data.layers[h], number("depth"), data.heads[h], number("kv_head"), data.components[component],
    source.explained_variance[at], source.r_q[at], source.r_k[at], source.n_q[at], source.n_k[at],
    data.kind("rotary", checkpoint, h), number("rotary_dims"), number("head_dim"), data.kind("attention", checkpoint, h), number("attention_window"),
    source.window[at], data.categories[source.category[at]].name,
  ];
}

// The rows of qk.csv (without the lines over position), for the heads that are meant or for all.
export function headTable(app, checkpoint, filtered) {
  const { data, store, selection } = app;
  const { choice, component } = store.state;
  const mask = selection.mask(checkpoint);
  const rows = [];
  for (let h = 0; h < data.nHeads; h += 1) {
    const there = data.choices[choice].category[data.at(checkpoint, component, h)] !== data.absent;
    if (there && (mask[h] || !filtered)) rows.push(headRow(data, choice, checkpoint, component, h));
  }
  return { columns: HEAD_COLUMNS, rows };
}

export function wholeTable(app) {
  const { data, store } = app;
  const { choice } = store.state;
  const rows = [];
  data.checkpoints.forEach((_, c) => {
    for (let h = 0; h < data.nHeads; h += 1) {
      for (let p = 0; p < data.components.length; p += 1) {
        if (data.choices[choice].category[data.at(c, p, h)] !== data.absent) rows.push(headRow(data, choice, c, p, h));
      }
    }
  });
  return { columns: HEAD_COLUMNS, rows };
}

const SURE = ["same category", "category_share"]; // in how many samples of documents
const SHOWN = [["head", null], ["category", null], ["r_q", "r_q"], ["r_k", "r_k"], ["explained variance", "explained_variance"], ["n queries", "n_q"], ["n keys", "n_k"]];

export function tablePanel(app) {
  const { data, store, selection } = app;
  let [sort, rising, first] = [null, false, 0];
  const body = element("tbody");
  const status = element("span", { class: "about" });
  const columns = data.hasErrors ? [...SHOWN, SURE] : SHOWN;
  const headers = columns.map(([text, key]) => {
    const act = () => {
      [sort, rising, first] = [key, sort === key ? !rising : false, 0];
      draw();
    };
    return element("th", { scope: "col" }, key ? button(text, act, { class: "sort" }) : text);
  });
  const draw = () => {
    const { checkpoint, component, choice } = store.state;
    const source = data.choices[choice];
    const mask = selection.mask(checkpoint);
    const sure = (h) => data.flag(SURE[1], store.state, checkpoint, h);
    const value = (h, key) => (key === SURE[1] ? sure(h) : source[key][data.at(checkpoint, component, h)]);
    const heads = data.layers.map((_, h) => h).filter((h) => mask[h]);
    const order = (a, b) => (Number.isFinite(a) ? (Number.isFinite(b) ? a - b : -1) : Number.isFinite(b) ? 1 : 0);
    if (sort) heads.sort((a, b) => (rising ? order(value(a, sort), value(b, sort)) : Number.isFinite(value(a, sort)) && Number.isFinite(value(b, sort)) ? -order(value(a, sort), value(b, sort)) : order(value(a, sort), value(b, sort))));
    headers.forEach((node, i) => node.setAttribute("aria-sort", columns[i][1] && columns[i][1] === sort ? (rising ? "ascending" : "descending") : "none"));
    first = Math.max(0, Math.min(first, heads.length - 1));
    const shown = heads.slice(first, first + PAGE);
    body.replaceChildren(
      ...shown.map((h) => {
        const code = source.category[data.at(checkpoint, component, h)];
        const numbers = ["r_q", "r_k", "explained_variance"].map((key) => element("td", {}, estimate(value(h, key), data.error(key, store.state, checkpoint, h))));
        const counts = ["n_q", "n_k"].map((key) => element("td", {}, whole(value(h, key))));
        if (data.hasErrors) counts.push(element("td", {}, Number.isFinite(sure(h)) ? percent(sure(h)) : "not known"));
        return element("tr", {}, element("th", { scope: "row" }, button(data.name(h), () => store.set({ head: h }), { class: "linklike" })), element("td", { class: "left" }, swatchOf(app, code, data.kind("layer_kind", checkpoint, h), data.runsAgainst(choice, data.at(checkpoint, component, h))), ` ${data.categoryName(code, component)}`), ...numbers, ...counts);
      }),
    );
    const range = heads.length ? `${first + 1} to ${first + shown.length} of ${plural(heads.length, "head")} ${data.atOrIn} ` : `no heads ${data.atOrIn} `;
    status.replaceChildren(range, named(data.checkpoints[checkpoint].label));
  };
  const turn = (by) => {
    first += by;
    draw();
  };
  const uses = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];
  store.subscribe((changed) => uses.some((key) => changed.has(key)) && draw());
  draw();
  const save = (table, what) => saveCsv(table, fileName("qkscope", data.about.title, what));
  return element(
    "div", { class: "view", id: "numbers" },
    element("div", { class: "options" }, button("‹ Previous", () => turn(-PAGE), { class: "tool" }), button("Next ›", () => turn(PAGE), { class: "tool" }), status),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of heads" }, element("table", { class: "numbers heads" }, element("caption", { class: "hidden" }, `Heads ${data.atOrIn} the ${data.noun} on the slider`), element("thead", {}, element("tr", {}, ...headers)), body)),
    element(
      "div", { class: "options" },
      button("CSV: these heads", () => save(headTable(app, store.state.checkpoint, true), "heads"), { class: "tool", id: "csv-heads" }),
      button("CSV: everything at this window", () => save(wholeTable(app), store.state.choice === "common" ? "qk_common" : "qk"), { class: "tool", id: "csv-all" }),
    ),
    element("p", { class: "note" }, data.about.data.precision === "float64" ? "CSV files carry every digit of qk.csv." : "This study is large: the page holds PC0 in single precision (seven digits) and other components in half (three); qk.csv has every digit.", data.hasErrors ? " ± is 1 standard error over documents, of component 0; qk.csv has those of all components." : ""),
  );
}
