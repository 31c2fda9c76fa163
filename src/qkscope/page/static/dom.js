// Making elements. Text only ever becomes a text node, so names from data cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value === true) {
      node.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// An HTML element; strings among the children become text.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A name from the data: isolated, so that its writing direction stays its own.
export function named(text) {
  return element("bdi", {}, text);
}

export function button(label, action, attributes = {}) {
  return element("button", { type: "button", ...attributes, on: { click: action } }, label);
}

// A group of buttons of which one is chosen. `choices` are [value, label]; `update` marks the chosen one.
export function segmented(label, choices, choose) {
  const buttons = new Map(
    choices.map(([value, text]) => [value, button(text, () => choose(value), { "aria-pressed": "false" })]),
  );
  const node = element("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons.values());
  const update = (chosen) => {
    for (const [value, each] of buttons) each.setAttribute("aria-pressed", String(value === chosen));
  };
  return { node, update };
}

export function select(label, choices, choose) {
  const options = choices.map(([value, text]) => element("option", { value }, text));
  const node = element("select", { "aria-label": label, on: { change: () => choose(node.value) } }, ...options);
  return node;
}

export function checkbox(label, checked, change) {
  const box = element("input", { type: "checkbox", on: { change: () => change(box.checked) } });
  box.checked = checked;
  return element("label", { class: "check" }, box, label);
}
