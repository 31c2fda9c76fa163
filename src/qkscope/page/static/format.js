// Numbers and names as a reader expects them. What does not exist is said to be undefined, never 0.

export const UNDEFINED = "undefined";

// Making a formatter takes longer than using it a hundred times.
const formats = new Map();

// A number with so many decimals, and commas between thousands.
export function decimal(value, decimals) {
  if (!formats.has(decimals)) formats.set(decimals, new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
  return formats.get(decimals).format(value);
}

function signed(text) {
  const value = Number(text) === 0 ? text.replace("-", "") : text;
  return value.replace("-", "−");
}

// A correlation: two decimals in drawings, four where a single head is read.
export function correlation(value, digits = 2) {
  return Number.isFinite(value) ? signed(value.toFixed(digits)) : UNDEFINED;
}

export function difference(value, digits = 2) {
  if (!Number.isFinite(value)) return UNDEFINED;
  const text = correlation(value, digits);
  return value > 0 && Number(text) !== 0 ? `+${text}` : text;
}

export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${signed((100 * share).toFixed(digits))}%` : UNDEFINED;
}

const wholes = new Intl.NumberFormat("en-US");
export function whole(value) {
  return Number.isFinite(value) ? wholes.format(value) : "not recorded";
}

export function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function size(bytes) {
  return bytes < 1e6 ? `${Math.round(bytes / 1e3)} KB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

// Both ends of a name tell it apart, so the middle gives way.
export function shorten(text, letters) {
  const all = Array.from(text);
  if (all.length <= letters) return text;
  const tail = Math.floor((letters - 1) / 2);
  return `${all.slice(0, letters - 1 - tail).join("")}…${all.slice(all.length - tail).join("")}`;
}

export function headName(layer, head) {
  return `L${layer}H${head}`;
}

// A file name that every system takes.
export function fileName(...parts) {
  const safe = parts.map((part) => part.normalize("NFKD").replace(/[^A-Za-z0-9.+-]+/g, "-").replace(/^[-.]+|[-.]+$/g, ""));
  return safe.filter(Boolean).join("_").slice(0, 100);
}
