// Cards, provenance and commands: text that can be read and copied. Cards arrive as blocks, never as HTML.

import { button, element } from "./dom.js";

export function runs(list) {
  return list.map(([kind, text]) => (kind === "text" ? text : element(kind, {}, text)));
}

// Blocks as elements; items that follow each other share a list, bullets may sit below a numbered item.
export function renderBlocks(blocks, lowest = 3) {
  const nodes = [];
  let list = null;
  let inner = null;
  for (const block of blocks) {
    if (block.kind !== "item") {
      [list, inner] = [null, null];
      const tag = block.kind === "heading" ? `h${Math.min(6, block.level + lowest - 1)}` : "p";
      nodes.push(element(tag, {}, ...runs(block.runs)));
    } else if (block.level && list) {
      if (!inner) list.lastElementChild.append((inner = element("ul")));
      inner.append(element("li", {}, ...runs(block.runs)));
    } else {
      const tag = block.numbered ? "ol" : "ul";
      if (list?.tagName.toLowerCase() !== tag) nodes.push((list = element(tag)));
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

function cardTitle(card) {
  const heading = card.blocks.find((block) => block.kind === "heading");
  return heading ? heading.runs.map(([, text]) => text).join("") : card.figure;
}

export class Cards {
  constructor(app) {
    this.app = app;
    this.list = app.data.about.cards;
    this.body = element("div", { class: "card-body" });
    this.dialog = element(
      "dialog", { class: "card", "aria-label": "Card" },
      element("form", { method: "dialog" }, element("button", { class: "tool", "aria-label": "Close card" }, "Close")),
      this.body,
    );
    document.body.append(this.dialog);
  }

  has(figure) {
    return this.list.some((card) => card.figure === figure);
  }

  // The card at the window that the page shows, else the one there is.
  show(figure) {
    const common = this.app.store.state.choice === "common";
    const cards = this.list.filter((card) => card.figure === figure);
    this.open(cards.find((card) => card.common === common) ?? cards[0]);
  }

  open(card) {
    const note = "Cards speak about all heads on PC0 and the drawing in the figures folder; filters of the page do not change them.";
    // The file names of the picture beside a card mean nothing here.
    const file = card.blocks.findIndex((block) => block.kind === "heading" && block.level === 2);
    const blocks = card.blocks.filter((_, i) => i !== file && i !== file + 1);
    this.body.replaceChildren(...renderBlocks(blocks, 2), element("p", { class: "about" }, note));
    this.dialog.setAttribute("aria-label", cardTitle(card));
    this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  // All cards by name, for those without a view of their own.
  index() {
    const items = this.list.map((card) => element("li", {}, button(cardTitle(card), () => this.open(card), { class: "linklike" })));
    return element("ul", { class: "card-list" }, ...items);
  }
}

export function provenancePanel(app) {
  const { data } = app;
  const commands = data.about.commands.map(([what, command]) =>
    element("div", { class: "command" }, element("span", { class: "about" }, `Makes ${what}`), element("code", {}, command), button("Copy", () => copyText(app, command, "Command copied"), { class: "tool", "aria-label": `Copy the command that makes ${what}` })),
  );
  const text = element("pre", { tabindex: "0", role: "region", "aria-label": "Provenance as JSON" });
  const all = element("details", { on: { toggle: () => all.open && (text.textContent = data.provenance) } }, element("summary", {}, "Provenance: what produced these numbers"), text);
  return element("div", {}, ...commands, element("div", { class: "command" }, button("Copy provenance", () => copyText(app, data.provenance, "Provenance copied"), { class: "tool" })), all);
}
