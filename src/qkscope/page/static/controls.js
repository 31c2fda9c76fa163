// The bar that stays in view: play, slider, window, component, search, theme. And the filters below it.

import { button, checkbox, element, named, segmented, select } from "./dom.js";
import { correlation, percent, plural } from "./format.js";
import { phaseRuns } from "./axis.js";
import { UNSURE } from "./sure.js";
import { nothingHidden } from "./state.js";
import { swatchOf } from "./swatch.js";

function player(app) {
  const { store, selection, data } = app;
  const play = button("▶", () => {
    const list = selection.checkpoints();
    if (!store.state.playing && store.state.checkpoint === list[list.length - 1]) store.set({ checkpoint: list[0] });
    store.set({ playing: !store.state.playing });
  }, { class: "play", id: "play" });
  const move = () => store.set({ playing: false, checkpoint: selection.checkpoints()[Number(slider.value)] });
  const slider = element("input", { type: "range", id: "slider", min: 0, step: 1, "aria-label": data.Noun, on: { input: move } });
  const now = element("output", { class: "now", for: "slider" });
  const phases = element("div", { class: "phases", "aria-hidden": "true" });
  const update = () => {
    const list = selection.checkpoints();
    const place = Math.max(0, list.indexOf(store.state.checkpoint));
    const { label, phase } = data.checkpoints[store.state.checkpoint];
    slider.max = list.length - 1;
    slider.value = place;
    slider.disabled = list.length < 2;
    slider.setAttribute("aria-valuetext", `${label}${phase ? `, ${phase}` : ""}, ${place + 1} of ${list.length}`);
    now.replaceChildren(named(label), element("span", { class: "about" }, ` ${place + 1}/${list.length}`));
    play.textContent = store.state.playing ? "❚❚" : "▶";
    play.setAttribute("aria-label", store.state.playing ? "Pause" : data.oneRun ? "Play through training" : `Play through the ${data.noun}s`);
    play.disabled = list.length < 2;
  };
  const drawPhases = () => {
    const runs = phaseRuns(data, selection.checkpoints());
    phases.replaceChildren(...(runs.length > 1 ? runs : []).map(([phase, first, last]) => {
      const part = element("span", { title: phase }, named(phase));
      part.style.flexGrow = last - first + 1;
      return part;
    }));
  };
  store.subscribe((changed) => {
    if (changed.has("hidden") || changed.has("checkpoint")) {
      const list = selection.checkpoints();
      if (!list.includes(store.state.checkpoint)) store.set({ checkpoint: list[list.length - 1] });
      if (changed.has("hidden")) drawPhases();
    }
    if (["checkpoint", "hidden", "playing"].some((key) => changed.has(key))) update();
  });
  update();
  drawPhases();
  return element("div", { class: "player" }, play, element("div", { class: "track" }, slider, phases), now);
}

function search(app) {
  const { data, store } = app;
  const field = element("input", { type: "search", id: "search", placeholder: "L12H3", "aria-label": "Find a head, for example L12H3", autocomplete: "off", spellcheck: "false", size: 8 });
  const look = () => {
    const match = /^\s*L?\s*(\d+)\s*[\s.:,/-]?\s*H?\s*(\d+)\s*$/i.exec(field.value);
    const head = match ? data.byName.get(`L${Number(match[1])}H${Number(match[2])}`) : undefined;
    field.setAttribute("aria-invalid", String(Boolean(field.value) && head === undefined));
    return head;
  };
  field.addEventListener("input", () => {
    const head = /H\s*\d/i.test(field.value) ? look() : undefined;
    if (head !== undefined) store.set({ head });
    if (!field.value) field.setAttribute("aria-invalid", "false");
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const head = look();
    if (head === undefined) app.announce(`No head ${field.value} here; layers 0 to ${data.nLayers - 1}, heads 0 to ${data.nColumns - 1}, as in L3H1`, true);
    else store.set({ head });
  });
  return field;
}

function themeButton(app) {
  const node = button("", () => app.store.set({ theme: app.dark() ? "light" : "dark" }), { class: "quiet", id: "theme" });
  const update = () => {
    node.textContent = app.dark() ? "Light" : "Dark";
    node.setAttribute("aria-label", `Switch to ${app.dark() ? "light" : "dark"} colors`);
  };
  app.store.subscribe((changed) => changed.has("theme") && update());
  update();
  return node;
}

// Filters act in every view, so the bar says that there are some, and takes them away.
function filterPill(app) {
  const { store, selection } = app;
  const node = button("", () => showAll(app), { class: "chip pill", id: "pill" });
  const update = () => {
    node.hidden = !selection.active;
    node.textContent = `${selection.title()} ✕`;
    node.setAttribute("aria-label", `Filters are on: ${selection.title()}. Show all`);
  };
  store.subscribe((changed) => ["checkpoint", "component", "choice", "layers", "hidden", "brush"].some((key) => changed.has(key)) && update());
  update();
  return node;
}

function showAll(app) {
  app.store.set({ layers: null, brush: null, hidden: nothingHidden() });
  app.announce("All heads are shown");
}

export function bar(app) {
  const { data, store } = app;
  const windows = [["own", "native length"], ["common", "common window"], ...(data.checkpoints.length > 1 ? [["both", "both"]] : [])];
  const choice = segmented("Context length", windows, (value) => store.set({ choice: value === "common" ? "common" : "own", both: value === "both" }));
  const shownWindow = () => (store.state.both && windows.length > 2 ? "both" : store.state.choice);
  choice.update(shownWindow());
  choice.node.id = "choice";
  const component = select("Component", data.components.map((pc, i) => [i, `PC${pc}`]), (value) => store.set({ component: Number(value) }));
  component.id = "component";
  component.value = store.state.component;
  store.subscribe((changed) => {
    if (changed.has("choice") || changed.has("both")) choice.update(shownWindow());
    if (changed.has("component")) component.value = store.state.component;
  });
  return element(
    "div", { class: "bar", role: "region", "aria-label": "Controls of all views" },
    player(app),
    element("div", { class: "switches" }, data.choices.common ? choice.node : null, data.components.length > 1 ? component : null, filterPill(app), search(app), themeButton(app)),
  );
}

// Categories: key of the colours, live counts, and filter in one.
export function legend(app) {
  const { data, store, summaries } = app;
  const node = element("div", { class: "legend", role: "group", "aria-label": "Categories: shown or left out" });
  const toggle = (name) => {
    const hidden = store.state.hidden.category;
    const category = hidden.includes(name) ? hidden.filter((each) => each !== name) : [...hidden, name];
    store.set({ hidden: { ...store.state.hidden, category, at: category.length ? store.state.checkpoint : null } });
  };
  const update = () => {
    const s = summaries.at(store.state.checkpoint);
    const focused = node.contains(document.activeElement) ? Array.from(node.children).indexOf(document.activeElement) : -1;
    const chips = data.categories.map((category, i) => {
      const off = store.state.hidden.category.includes(category.name);
      if (i === data.undefinedCode && !s.counts[i] && !off) return null;
      const chip = button(swatchOf(app, i), () => toggle(category.name), { class: "chip", "aria-pressed": String(!off) });
      const against = i === 0 && s.against && !off ? element("span", { class: "about" }, " (", swatchOf(app, 0, "rotary", true), ` ${s.against} with ${data.about.against.name})`) : "";
      chip.append(` ${data.categoryName(i, store.state.component)} `, element("b", {}, off ? "off" : `${s.counts[i]}`), off || !s.heads ? "" : element("span", { class: "about" }, ` ${percent(s.shares[i])}`), against);
      return chip;
    });
    node.replaceChildren(...chips.filter(Boolean));
    if (focused >= 0) node.children[focused]?.focus();
  };
  const uses = ["checkpoint", "component", "choice", "layers", "hidden", "brush", "theme"];
  store.subscribe((changed) => uses.some((key) => changed.has(key)) && update());
  update();
  return node;
}

function choices(app, what, title, values) {
  const change = (value, on) => {
    const { hidden } = app.store.state;
    const list = on ? hidden[what].filter((each) => each !== value) : [...hidden[what], value];
    if (what === "phase" && list.length === values.length) {
      update();
      app.announce("At least one phase stays", true);
      return;
    }
    app.store.set({ hidden: { ...hidden, [what]: list } });
  };
  const pairs = values.map((each) => [each].flat());
  const boxes = pairs.map(([value, text = value]) => checkbox(named(text || "unnamed"), true, (on) => change(value, on)));
  const update = () => boxes.forEach((box, i) => (box.firstElementChild.checked = !app.store.state.hidden[what].includes(pairs[i][0])));
  app.store.subscribe((changed) => changed.has("hidden") && update());
  update();
  return element("fieldset", { "data-filter": what }, element("legend", {}, title), ...boxes);
}

function numberField(label, { min, max, step }) {
  const input = element("input", { type: "number", min, max, step, "aria-label": label });
  return input;
}

function layerFilter(app) {
  const last = app.data.nLayers - 1;
  const [from, to] = ["First layer", "Last layer"].map((label) => numberField(label, { min: 0, max: last, step: 1 }));
  const inside = (field, otherwise) => Math.max(0, Math.min(last, field.value === "" ? otherwise : Math.round(Number(field.value))));
  const change = () => {
    const range = [inside(from, 0), inside(to, last)].sort((a, b) => a - b);
    app.store.set({ layers: range[0] <= 0 && range[1] >= last ? null : range });
  };
  for (const field of [from, to]) field.addEventListener("input", change);
  app.store.subscribe((changed) => {
    if (changed.has("layers") && ![from, to].includes(document.activeElement)) fill(); // not while it is being typed
  });
  const fill = () => ([from.value, to.value] = app.store.state.layers ?? ["", ""]);
  // What is beyond the last layer is brought back; a field that is empty stays so.
  for (const field of [from, to]) field.addEventListener("change", () => field.value !== "" && (field.value = inside(field, 0)));
  fill();
  [from.placeholder, to.placeholder] = ["0", String(last)];
  return element("fieldset", { "data-filter": "layers" }, element("legend", {}, "Layers"), from, " to ", to);
}

// The brush by numbers: the same box without a mouse.
function boxFilter(app) {
  const { store } = app;
  const fields = ["r_q from", "r_q to", "r_k from", "r_k to"].map((label) => numberField(label, { min: -1, max: 1, step: 0.05 }));
  const read = (field, otherwise) => (field.value === "" ? otherwise : Number(field.value));
  const apply = () => {
    const { checkpoint, component, choice } = store.state;
    const sorted = (a, b) => [a, b].sort((one, other) => one - other);
    store.set({ brush: { kind: "box", checkpoint, component, choice, r_q: sorted(read(fields[0], -1.06), read(fields[1], 1.06)), r_k: sorted(read(fields[2], -1.06), read(fields[3], 1.06)) } });
  };
  return element(
    "fieldset", { "data-filter": "box" }, element("legend", {}, `Box ${app.data.atOrIn} this ${app.data.noun}`),
    "r_q ", fields[0], " to ", fields[1], element("br"), "r_k ", fields[2], " to ", fields[3], " ", button("Keep", apply, { class: "tool" }),
  );
}

export function filters(app) {
  const { data, store, selection } = app;
  const phases = [...new Set(data.checkpoints.map((c) => c.phase ?? ""))];
  const groups = [
    layerFilter(app),
    phases.length > 1 ? choices(app, "phase", "Phases", phases) : null,
    data.texts.rotary.length > 1 ? choices(app, "rotary", "Position encoding", data.texts.rotary) : null,
    data.texts.attention.length > 1 ? choices(app, "attention", "Attention", data.texts.attention) : null,
    data.hasErrors ? choices(app, "unsure", "Confidence (PC0)", UNSURE) : null,
    boxFilter(app),
  ];
  const panel = element("details", { class: "filters", id: "filters" }, element("summary", {}, `Filter heads and ${data.noun}s`), element("div", { class: "filter-groups" }, ...groups.filter(Boolean)));
  const words = element("span", { id: "selection" });
  const clear = button("Show all", () => {
    for (const field of panel.querySelectorAll("input[type=number]")) field.value = "";
    showAll(app);
    panel.firstElementChild.focus({ preventScroll: true }); // the button is about to go
  }, { class: "tool", id: "clear" });
  const update = () => {
    const text = selection.words();
    words.textContent = `Showing ${selection.title()}${text ? `: ${text}` : ""}.`;
    clear.hidden = !selection.active;
  };
  const uses = ["checkpoint", "component", "choice", "layers", "hidden", "brush"];
  store.subscribe((changed) => uses.some((key) => changed.has(key)) && update());
  update();
  return element("div", { class: "filter-row" }, panel, element("p", { class: "selection" }, words, " ", clear));
}

export function settled(app) {
  const { data, store, summaries, selection } = app;
  const list = selection.checkpoints();
  const s = summaries.at(store.state.checkpoint);
  const where = `${data.checkpoints[store.state.checkpoint].label}, ${list.indexOf(store.state.checkpoint) + 1} of ${list.length}`;
  if (!s.heads) return `${where}: no head is left by the filters`;
  return `${where}: ${plural(s.heads, "head")}, mean r_q ${correlation(s.r_q.mean)}, mean r_k ${correlation(s.r_k.mean)}`;
}
