// Cards, provenance and commands: text that can be read and copied. Cards arrive as blocks, never as HTML.

import { button, element } from "./dom.js";

export function runs(list) {
  return list.map(([kind, text]) => (kind === "text" ? text : element(kind, {}, text)));
}

function lineOf(block, lowest) {
  const tag = block.kind === "heading" ? `h${Math.min(6, block.level + lowest - 1)}` : "p";
  return element(tag, {}, ...runs(block.runs));
}

function tableOf(block) {
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...runs(cell))));
  const table = element("table", {}, element("thead", {}, row(block.titles, "th")), element("tbody", {}, ...block.rows.map((cells) => row(cells, "td"))));
  return element("div", { class: "table-scroll" }, table);
}

// Blocks as elements; items that follow each other share a list, bullets of a higher level are nested.
export function renderBlocks(blocks, lowest = 3) {
  const nodes = [];
  let list = null;
  let inner = null;
  for (const block of blocks) {
    if (block.kind !== "item") {
      [list, inner] = [null, null];
      nodes.push(block.kind === "table" ? tableOf(block) : lineOf(block, lowest));
    } else if (block.level && list) {
      if (!inner) list.lastElementChild.append((inner = element("ul")));
      inner.append(element("li", {}, ...runs(block.runs)));
    } else {
      if (!list) nodes.push((list = element("ul")));
      inner = null;
      list.append(element("li", {}, ...runs(block.runs)));
    }
  }
  return nodes;
}

export async function copyText(app, text, done) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy"); // where a page from disk may not use the clipboard
    field.remove();
  }
  app.announce(done, true);
}

// A card's parts by their headings of level 2: [heading, blocks].
function partsOf(blocks) {
  const parts = [];
  for (const block of blocks) {
    if (block.kind === "heading" && block.level === 1) continue;
    if (block.kind === "heading" && block.level === 2) parts.push([block.runs.map(([, text]) => text).join(""), []]);
    else if (parts.length) parts.at(-1)[1].push(block);
  }
  return parts;
}

// The takeaway first; what the drawing in the figures folder shows, and how it was made, are folded.
function cardBody(blocks) {
  const parts = partsOf(blocks).filter(([name]) => name !== "File"); // names of files beside the card mean nothing here
  const isTakeaway = ([name]) => /takeaway/i.test(name);
  const folded = parts.filter((part) => !isTakeaway(part));
  return [
    ...parts.filter(isTakeaway).flatMap(([name, inside]) => [element("h4", {}, name), ...renderBlocks(inside, 4)]),
    ...folded.map(([name, inside]) => element("details", {}, element("summary", {}, name), ...renderBlocks(inside, 4))),
    element("p", { class: "about" }, "All heads, PC0, as in the figures folder; filters do not apply."),
  ];
}

export class Cards {
  constructor(app) {
    this.app = app;
    this.list = app.data.about.cards;
  }

  has(figure) {
    return this.list.some((card) => card.figure === figure);
  }

  async #blocks(place) {
    this.blocks ??= (await this.app.data.later()).cards();
    return this.blocks[place];
  }

  // Below its chart. Again, and it is folded away.
  async toggle(node, figure) {
    if (!node.hidden) {
      node.hidden = true;
      return;
    }
    const place = this.list.findIndex((card) => card.figure === figure);
    const leave = () => {
      node.hidden = true;
      node.parentElement.querySelector(".menu > summary").focus({ preventScroll: true });
    };
    const close = button("Close", leave, { class: "tool", "aria-label": "Close card" });
    node.replaceChildren(close, element("div", { class: "card-body" }, ...cardBody(await this.#blocks(place))));
    node.hidden = false;
    close.focus({ preventScroll: true });
    this.app.announce(`Card: ${this.list[place].title}`);
  }

  // All cards by name, for those without a view of their own: each unfolds in its place.
  index() {
    const items = this.list.map((card, place) => {
      const body = element("div", { class: "card-body" });
      const node = element("details", { on: { toggle: async () => node.open && !body.childElementCount && body.replaceChildren(...cardBody(await this.#blocks(place))) } }, element("summary", {}, card.title.replace(`${this.app.data.about.title}: `, "")), body);
      return element("li", {}, node);
    });
    return element("ul", { class: "card-list" }, ...items);
  }
}

export function provenancePanel(app) {
  const { data } = app;
  const commands = data.about.commands.map(([what, command]) =>
    element("div", { class: "command" }, element("span", { class: "about" }, `Makes ${what}`), element("code", {}, command), button("Copy", () => copyText(app, command, "Command copied"), { class: "tool", "aria-label": `Copy the command that makes ${what}` })),
  );
  const provenance = async () => (await data.later()).provenance();
  const text = element("pre", { tabindex: "0", role: "region", "aria-label": "Provenance as JSON" });
  const all = element("details", { on: { toggle: async () => all.open && (text.textContent = await provenance()) } }, element("summary", {}, "Provenance: what produced these numbers"), text);
  return element("div", {}, ...commands, element("div", { class: "command" }, button("Copy provenance", async () => copyText(app, await provenance(), "Provenance copied"), { class: "tool" })), all);
}
