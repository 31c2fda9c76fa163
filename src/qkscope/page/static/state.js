// One state for all views, and its short form in the address.

export function createStore(initial) {
  const state = { ...initial };
  const listeners = [];
  return {
    state,
    subscribe: (listener) => listeners.push(listener),
    // Something changed that is not in the state itself, such as the reader's preference for dark.
    touch: (key) => listeners.forEach((listener) => listener(new Set([key]))),
    // Listeners hear which keys have changed; a change to the same value is none.
    set(changes) {
      const changed = new Set(Object.keys(changes).filter((key) => state[key] !== changes[key]));
      if (!changed.size) return;
      Object.assign(state, changes);
      for (const listener of listeners) listener(changed);
    },
  };
}

// What the filters leave out at first.
export function nothingHidden() {
  return { phase: [], category: [], rotary: [], attention: [], unsure: [] };
}

export function initialState(data) {
  const last = data.checkpoints.length - 1;
  return {
    checkpoint: last,
    component: 0,
    choice: "own",
    measure: "category",
    trail: data.nHeads > 1000 ? "0" : "3", // thousands of trails are a haze
    head: null,
    hover: null,
    playing: false,
    layers: null, // [first, last]
    hidden: nothingHidden(),
    brush: null, // a box in the portrait or in the map
    compare: [0, last],
    windowMeasure: "r_q",
    split: false,
    theme: null,
  };
}

// A checkpoint as it stands in an address: its label, or its name where labels repeat.
function checkpointKey(data, index) {
  const { label, name } = data.checkpoints[index];
  return data.checkpoints.filter((c) => c.label === label).length === 1 ? label : name;
}

function checkpointIndex(data, key) {
  const byLabel = data.checkpoints.findIndex((c) => c.label === key);
  return byLabel >= 0 ? byLabel : data.checkpoints.findIndex((c) => c.name === key);
}

export function toHash(data, state) {
  const entries = new URLSearchParams();
  if (state.head !== null) entries.set("head", `${data.layers[state.head]}.${data.heads[state.head]}`);
  entries.set("ckpt", checkpointKey(data, state.checkpoint));
  if (state.component) entries.set("pc", data.components[state.component]);
  if (state.choice === "common") entries.set("window", "common");
  return `#${entries}`;
}

// The changes that an address asks for; what it names and the data lacks is left out.
export function fromHash(data, hash) {
  const entries = new URLSearchParams(hash.replace(/^#/, ""));
  const changes = {};
  const place = /^(\d+)\.(\d+)$/.exec(entries.get("head") ?? "");
  const head = place ? data.byName.get(`L${Number(place[1])}H${Number(place[2])}`) : undefined;
  if (head !== undefined) changes.head = head;
  const checkpoint = entries.has("ckpt") ? checkpointIndex(data, entries.get("ckpt")) : -1;
  if (checkpoint >= 0) changes.checkpoint = checkpoint;
  const component = entries.has("pc") ? data.components.indexOf(Number(entries.get("pc"))) : -1;
  if (component >= 0) changes.component = component;
  if (entries.get("window") === "common" && data.choices.common) changes.choice = "common";
  return changes;
}

export function writeHash(hash) {
  try {
    window.history.replaceState(null, "", hash);
  } catch {
    window.location.replace(hash); // a browser that does not let pages from disk rewrite their address
  }
}
