// What is worked out when it is first read, and kept.

// A property that is worked out when it is first read.
export function lazily(object, name, make) {
  Object.defineProperty(object, name, {
    configurable: true,
    enumerable: true,
    get() {
      const value = make();
      Object.defineProperty(object, name, { value, enumerable: true });
      return value;
    },
  });
}

// The same for several names at once: { name: make(name) }.
export function lazyTable(names, make) {
  const table = {};
  for (const name of names) lazily(table, name, () => make(name));
  return table;
}
