// Puts the page together: data, one state, all views, in the order of the story.

import { Cards, provenancePanel } from "./cards.js";
import { Motion } from "./motion.js";
import { Selection } from "./selection.js";
import { Summaries } from "./stats.js";
import { View } from "./view.js";
import { bar, filters, legend, settled } from "./controls.js";
import { button, element } from "./dom.js";
import { colours } from "./colours.js";
import { compareView, differenceMap } from "./compare.js";
import { keptWords } from "./columns.js";
import { createStore, fromHash, initialState, isLinked, toHash, writeHash } from "./state.js";
import { curveViews } from "./curves.js";
import { depthViews } from "./depth.js";
import { explorer } from "./explorer.js";
import { headDrawer, startChips } from "./drawer.js";
import { headMap } from "./map.js";
import { headSentence, oneHeadViews } from "./onehead.js";
import { headTable, tablePanel } from "./tables.js";
import { firstScreen, howToRead, takeaway } from "./first_screen.js";
import { countUndefined, lensParts } from "./lenses.js";
import { loadData } from "./data.js";
import { matterViews } from "./matter.js";
import { scatterSpec } from "./lens_scatter.js";
import { shareViews } from "./shares.js";
import { signalView } from "./signal.js";
import { size, whole } from "./format.js";
import { waterfallView } from "./waterfall.js";
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
  const { changes, problems } = fromHash(data, window.location.hash);
  const store = createStore({ ...initialState(data), ...changes });
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
  app.headTable = (checkpoint, filtered) => headTable(app, checkpoint, filtered);
  app.describe = () => {
    const { checkpoint, component, choice } = store.state;
    const where = choice === "common" ? `common window of ${whole(data.window("common", checkpoint))} tokens` : `each ${data.noun} at its own context`;
    const words = app.selection.words();
    return `${data.checkpoints[checkpoint].label} on the slider; PC${data.components[component]}; ${where}; ${app.selection.title()}${words ? ` (${words})` : ""}`;
  };
  // Of what a file is: checkpoint, window, component.
  app.where = () => [data.checkpoints[store.state.checkpoint].label, store.state.both ? "both-windows" : `${store.state.choice}-window`, `PC${data.components[store.state.component]}`];
  app.problems = problems;
  app.motion = new Motion(app);
  prefersDark.addEventListener("change", () => store.touch("theme"));
  return app;
}

function applyTheme(app) {
  document.documentElement.dataset.theme = app.dark() ? "dark" : "light";
}

// A part of the page: one question as its heading, then what answers it. `views` are pairs side by side.
function section(id, title, intro, ...children) {
  return element("section", { class: "part", id, "aria-labelledby": `h-${id}` }, element("h2", { id: `h-${id}`, tabindex: "-1" }, title), intro ? element("p", { class: "intro" }, intro) : null, ...children.filter(Boolean));
}

function pair(...views) {
  const nodes = views.filter(Boolean).map((view) => view.node);
  return nodes.length ? element("div", { class: "pair" }, ...nodes) : null;
}

function folded(title, ...nodes) {
  const inside = nodes.filter(Boolean);
  return inside.length ? element("details", { class: "more" }, element("summary", {}, title), ...inside) : null;
}

// Go to a part without touching the address, which holds the state; focus goes along.
function goTo(id) {
  const heading = document.getElementById(`h-${id}`);
  heading.scrollIntoView({ block: "start" });
  heading.focus({ preventScroll: true });
}

function contents(sections) {
  const items = sections.map((each) => element("li", {}, button(each.querySelector("h2").textContent, () => goTo(each.id), { class: "linklike" })));
  return element("nav", { class: "contents", "aria-label": "Contents" }, element("ol", {}, ...items));
}

function isItReal(app, parts) {
  const { data } = app;
  const scatter = (id, title, names, about, card) => {
    const columns = names.map((name) => app.statistics[name] ?? data.columns.get(name));
    if (columns.some((column) => !column)) return null;
    const spec = scatterSpec(app, { columns, title, diagonal: true });
    return new View(app, { ...spec, id, title, about, card, note: () => keptWords(app) || spec.note(countUndefined(app, columns)), uses: ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme", ...spec.uses] });
  };
  parts.rope = scatter("rope", "Measured r_q against the rotated-mean prediction", ["r_q_rope", "r_q"], "Across: r_q predicted from the head’s mean query and key before RoPE and the rotation. Heads on the dashed line need nothing else.", "rope_alone");
  parts.best = scatter("best", "PC0 against the best component", ["r_q", "best_r_q"], "Above the dashed line, another component tracks position more closely than PC0.", "measures");
  parts.decode = scatter("decode", "PC0 against the measure without a component", ["r_q", "decode_q"], "Up: the share of the variance of position that can be read out of whole queries.", "measures");
}

// All views by name; those that the data does not carry are null.
function makeViews(app) {
  const map = headMap(app);
  const depths = depthViews(app);
  const parts = { portrait: explorer(app), map, signal: signalView(app), ...curveViews(app), ...shareViews(app), rq: depths[0], rk: depths[1], waterfall: waterfallView(app), windows: windowView(app), compare: compareView(app), difference: differenceMap(app) };
  isItReal(app, parts);
  const one = oneHeadViews(app);
  const { score, ablation, plasticity } = matterViews(app);
  Object.assign(parts, { profile: one.profile, scoreMap: one.score, scoreSplit: score, ablation, plasticity: plasticity[0], pairs: plasticity[1] });
  app.views = Object.values(parts).filter(Boolean);
  return parts;
}

// The questions of the first screen, in its words (report/summary.py): their sections open with its sentences.
const [WHICH, WHEN, LONG, MATTERS] = ["Which heads encode position?", "When did they learn it?", "What did long-context training change?", "Does it matter?"];

function sectionsOf(app, v) {
  const { data } = app;
  const { noun } = data;
  const causes = [pair(v.waterfall, v.rope), pair(v.windows, v.best)].filter(Boolean);
  const matter = [pair(v.scoreSplit, v.ablation), pair(v.plasticity, v.pairs)].filter(Boolean);
  const hasOne = v.profile || v.scoreMap;
  return [
    section("explore", WHICH, takeaway(app, WHICH) ?? "", element("p", { class: "intro" }, `Move through the ${noun}s with the slider; every view follows. Position-dominated: queries and keys both track position closely. Q- or K-positional: only one does. Content-focused: neither.`), filters(app), legend(app), element("div", { class: "explore" }, v.map.node, v.portrait.node), hasOne ? null : startChips(app)),
    section("training", data.oneRun ? WHEN : `How do the ${noun}s differ?`, takeaway(app, WHEN), v.signal.node, pair(v.rq, v.rk), v.flow ? pair(v.flow) : null, folded("More: categories, components of mean r_k, explained variance", pair(v.stack, v.concordance), pair(v.variance))),
    causes.length ? section("real", takeaway(app, LONG) ? LONG : "Context length, RoPE base, or weights?", takeaway(app, LONG), ...causes, folded("More: a measure that needs no component", pair(v.decode))) : null,
    matter.length ? section("matter", MATTERS, takeaway(app, MATTERS), ...matter) : null,
    hasOne ? section("one", "What does one head do?", null, howToRead(app), headSentence(app), pair(v.profile, v.scoreMap), startChips(app)) : section("one", "How are single heads read?", null, howToRead(app)),
    v.compare ? section("compare", data.oneRun ? `What differs between two ${noun}s?` : `The ${noun}s side by side`, null, v.compare.node, pair({ node: v.compare.measures }, v.difference)) : null,
    section("table", "What are the numbers?", null, tablePanel(app), ...lensParts(app), element("h3", { id: "cards" }, "Cards"), element("p", { class: "intro" }, "What each figure of the figures folder shows, computed from this study."), app.cards.index(), element("h3", { id: "provenance" }, "Where this comes from"), provenancePanel(app)),
  ].filter(Boolean);
}

// How high the bar is now: what is scrolled to must not hide under it.
function watchBar(node) {
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${Math.ceil(node.getBoundingClientRect().height)}px`)).observe(node);
}

function build(app) {
  const { data } = app;
  const sections = sectionsOf(app, makeViews(app));
  const controls = bar(app);
  document.getElementById("app").replaceChildren(
    button("Skip to the heads", () => goTo("explore"), { class: "skip" }),
    firstScreen(app),
    contents(sections),
    controls,
    element("main", {}, ...sections),
    headDrawer(app).node,
    element("footer", {}, `Made by qkscope ${data.about.version}. One file of ${size(data.fileBytes)}, ${whole(data.about.data.rows)} rows, no network.`),
  );
  watchBar(controls);
}

function tellProblems(app, problems) {
  if (problems.length) app.announce(`This link points to something that is not in this study: ${problems.join(", ")}`, true);
}

// Writes the state into the address. While the slider moves once it has stopped: browsers take long for it, and stop
// listening to a page that does it hundreds of times.
function addressWriter(app) {
  let timer = null;
  const write = () => writeHash(toHash(app.data, app.store.state));
  return (sliding) => {
    clearTimeout(timer);
    if (sliding) timer = setTimeout(write, 150);
    else write();
  };
}

function connect(app) {
  const { store, data } = app;
  const address = addressWriter(app);
  store.subscribe((changed) => {
    if (changed.has("theme")) applyTheme(app);
    if (isLinked(changed) && !store.state.playing) address(changed.size === 1 && changed.has("checkpoint"));
    if (changed.has("checkpoint") && !store.state.playing) app.announce(settled(app));
    if (changed.has("head") && store.state.head !== null) app.announce(`Head ${data.name(store.state.head)} chosen`);
  });
  window.addEventListener("hashchange", () => {
    const { changes, problems } = fromHash(data, window.location.hash);
    store.set(changes);
    tellProblems(app, problems);
  });
  const print = (on) => {
    app.printing = on;
    for (const node of document.querySelectorAll("details.more")) node.open = on || node.open;
    store.touch("theme");
    for (const view of app.views) {
      view.measure();
      view.draw();
    }
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
  tellProblems(app, app.problems);
  window.qkscope = inspection(app);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const text = `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later; the same figures are in the figures folder.`;
  document.getElementById("app").replaceChildren(element("p", { class: "waiting", role: "alert" }, text));
  throw error;
});
