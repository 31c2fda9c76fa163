// Puts the page together: data, one state, all views.

import { Cards, provenancePanel, runs } from "./cards.js";
import { Motion } from "./motion.js";
import { Selection } from "./selection.js";
import { Summaries } from "./stats.js";
import { bar, filters, legend, settled } from "./controls.js";
import { colours } from "./colours.js";
import { compareView } from "./compare.js";
import { createStore, fromHash, initialState, toHash, writeHash } from "./state.js";
import { curveViews } from "./curves.js";
import { depthViews } from "./depth.js";
import { element } from "./dom.js";
import { explorer } from "./explorer.js";
import { headMap } from "./map.js";
import { headPanel } from "./headpanel.js";
import { headTable, tablePanel } from "./tables.js";
import { lensSections } from "./lenses.js";
import { loadData } from "./data.js";
import { shareViews } from "./shares.js";
import { size, whole } from "./format.js";
import { windowView } from "./windows.js";

function makeTooltip() {
  const node = element("div", { class: "tooltip", "aria-hidden": "true" });
  document.body.append(node);
  return {
    hide: () => node.classList.remove("shown"),
    show(lines, x, y) {
      node.replaceChildren(...lines.map((line, i) => element(i ? "div" : "strong", {}, line)));
      node.classList.add("shown");
      const { width, height } = node.getBoundingClientRect();
      node.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - width - 8))}px`;
      node.style.top = `${y + 16 + height > window.innerHeight ? y - height - 12 : y + 16}px`;
    },
  };
}

// What screen readers hear; with `shown` everyone sees it for a moment.
function makeAnnouncer() {
  const live = element("div", { class: "hidden", role: "status", "aria-live": "polite", id: "live" });
  const toast = element("div", { class: "toast", "aria-hidden": "true" });
  document.body.append(live, toast);
  let timer = null;
  return (text, shown = false) => {
    live.textContent = text;
    if (!shown) return;
    toast.textContent = text;
    toast.classList.add("shown");
    clearTimeout(timer);
    timer = setTimeout(() => toast.classList.remove("shown"), 2500);
  };
}

function createApp(data) {
  const store = createStore({ ...initialState(data), ...fromHash(data, window.location.hash) });
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const prefersCalm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const app = { data, store, printing: false, dragging: null, draggingCells: null };
  app.dark = () => !app.printing && (store.state.theme ? store.state.theme === "dark" : prefersDark.matches);
  app.calm = () => prefersCalm.matches;
  app.theme = () => colours(app.dark());
  app.selection = new Selection(data, store);
  app.summaries = new Summaries(data, store, app.selection);
  app.lowestQuery = Object.values(data.choices).reduce((low, r) => r.r_q.reduce((a, b) => (b < a ? b : a), low), 0);
  app.layerKinds = data.about.layerKinds; // where there is more than one, views can tell them apart
  app.tooltip = makeTooltip();
  app.announce = makeAnnouncer();
  app.cards = new Cards(app);
  app.hasCard = (figure) => app.cards.has(figure);
  app.showCard = (figure) => app.cards.show(figure);
  app.headTable = (checkpoint, filtered) => headTable(app, checkpoint, filtered);
  app.describe = () => {
    const { checkpoint, component, choice } = store.state;
    const where = choice === "common" ? `common window of ${whole(data.window("common", checkpoint))} tokens` : `each ${data.noun} at its own context`;
    const words = app.selection.words();
    return `${data.checkpoints[checkpoint].label} on the slider; PC${data.components[component]}; ${where}; ${app.selection.title()}${words ? ` (${words})` : ""}`;
  };
  app.motion = new Motion(app);
  prefersDark.addEventListener("change", () => store.touch("theme"));
  return app;
}

function applyTheme(app) {
  document.documentElement.dataset.theme = app.dark() ? "dark" : "light";
}

function section(id, title, intro, ...children) {
  return element("section", { class: "part", id, "aria-labelledby": `h-${id}` }, element("h2", { id: `h-${id}` }, title), intro ? element("p", { class: "intro" }, intro) : null, ...children.filter(Boolean));
}

function hero(app) {
  const { about } = app.data;
  const facts = about.facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", { dir: "auto" }, text)));
  return element(
    "header", { class: "hero" },
    element("p", { class: "kicker" }, "qkscope report"),
    element("h1", { dir: "auto" }, about.title),
    element("p", { class: "subtitle" }, `How attention heads follow token position ${about.span}`),
    element("div", { class: "hero-grid" }, element("ul", { class: "lead" }, ...about.lead.map((text) => element("li", {}, ...runs(text)))), element("dl", { class: "facts" }, ...facts)),
  );
}

function build(app) {
  const { data } = app;
  const curves = curveViews(app);
  const shares = shareViews(app);
  const depths = depthViews(app);
  const parts = { portrait: explorer(app), map: headMap(app), ...curves, ...shares, rq: depths[0], rk: depths[1], windows: windowView(app), compare: compareView(app) };
  const nodes = Object.fromEntries(Object.entries(parts).map(([key, view]) => [key, view?.node ?? null]));
  app.views = Object.values(parts).filter(Boolean);
  const pair = (...views) => element("div", { class: "pair" }, ...views.filter(Boolean));
  const steps = `${data.noun}s`;
  document.getElementById("app").replaceChildren(
    element("a", { class: "skip", href: "#explore" }, "Skip to the portrait"),
    hero(app),
    bar(app),
    element(
      "main", {},
      section("explore", "Every head", `r_q tells how far a head’s queries go with position, r_k the same for its keys. Move through the ${steps} with the slider; all views below follow.`, filters(app), legend(app), element("div", { class: "explore" }, nodes.portrait, nodes.map), headPanel(app).node),
      section("training", data.oneRun ? "Over training" : `Across ${data.noun}s`, null, pair(nodes.signal, nodes.concordance), pair(nodes.stack, nodes.flow), pair(nodes.variance, nodes.windows)),
      section("depth", "By depth", null, pair(nodes.rq, nodes.rk)),
      nodes.compare ? section("compare", `Two ${data.noun}s`, null, nodes.compare) : null,
      ...lensSections(app, section),
      section("table", "The numbers", null, tablePanel(app)),
      section("cards", "Cards", "What each figure shows, how it was made, and what to take from it, computed from this study.", app.cards.index()),
      section("provenance", "Where this comes from", null, provenancePanel(app)),
    ),
    element("footer", {}, `Made by qkscope ${data.about.version}. One file of ${size(data.fileBytes)}, ${whole(data.about.data.rows)} rows, no network.`),
  );
}

function connect(app) {
  const { store, data } = app;
  store.subscribe((changed) => {
    if (changed.has("theme")) applyTheme(app);
    const linked = ["head", "checkpoint", "component", "choice"].some((key) => changed.has(key));
    if (linked && !store.state.playing) writeHash(toHash(data, store.state));
    if (changed.has("checkpoint") && !store.state.playing) app.announce(settled(app));
    if (changed.has("head") && store.state.head !== null) app.announce(`Head ${data.name(store.state.head)} chosen`);
  });
  window.addEventListener("hashchange", () => store.set(fromHash(data, window.location.hash)));
  const print = (on) => {
    app.printing = on;
    store.touch("theme");
    for (const view of app.views) view.draw();
  };
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  window.matchMedia("print").addEventListener("change", (event) => print(event.matches));
}

// For tests and the curious: what the page shows, as plain values.
function inspection(app) {
  const { data, store, motion, selection, summaries } = app;
  return Object.freeze({
    state: () => structuredClone(store.state),
    moving: () => motion.moving,
    dots: () => data.layers.map((layer, h) => ({ layer, head: data.heads[h], r_q: motion.x[h], r_k: motion.y[h], shown: selection.mask(store.state.checkpoint)[h] === 1 })),
    summary: (checkpoint) => structuredClone(summaries.at(checkpoint)),
    flow: (before, after) => summaries.flow(before, after),
    depth: (checkpoint, statistic) => summaries.depth(checkpoint, statistic),
  });
}

async function start() {
  const data = await loadData();
  document.title = `${data.about.title}: qkscope report`;
  const app = createApp(data);
  applyTheme(app);
  build(app);
  connect(app);
  window.qkscope = inspection(app);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const text = `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later; the same figures are in the figures folder.`;
  document.getElementById("app").replaceChildren(element("p", { class: "waiting", role: "alert" }, text));
  throw error;
});
