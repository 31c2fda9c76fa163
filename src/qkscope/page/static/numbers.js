// Numbers of any size: as text, and as the ends and ticks of an axis.

import { UNDEFINED, correlation, decimal, percent } from "./format.js";

function minus(text) {
  return text.replaceAll("-", "−");
}

// A number with so many significant digits; powers of ten where zeros would fill the line.
export function significant(value, digits = 4) {
  if (Number.isNaN(value)) return UNDEFINED;
  const size = Math.abs(value);
  if (size === Infinity) return value < 0 ? "−∞" : "∞";
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(value.toExponential(digits - 1).replace("e+", "e"));
  const decimals = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return minus(decimal(value, decimals));
}

// The longest form of a number that fits into so many pixels; empty where only a sign would.
export function fitted(number, room, width) {
  return [number, number.replace(/^([−+]?)0\./, "$1.")].find((text) => width(text) <= room) ?? "";
}

// A limit or the end of a scale: no zeros that say nothing.
export function bound(value) {
  return significant(value, 3).replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
}

// A number with so many decimals; what rounds to 0 has no sign.
function fixed(value, decimals) {
  const text = decimal(value, decimals);
  return minus(/[1-9]/.test(text) ? text : text.replace("-", ""));
}

// A value and, where it is known, its standard error, both with the decimals that show two digits of the error. `plain`
// writes a value without one; `sign`: a plus before what is above 0; `atMost`: the error is an upper bound.
export function withError(value, error, { plain = significant, sign = false, atMost = false } = {}) {
  const plus = (text) => (sign && value > 0 && /[1-9]/.test(text) ? `+${text}` : text);
  if (!Number.isFinite(value + error)) return plus(plain(value));
  const most = atMost ? "at most " : "";
  const decimals = error > 0 ? Math.max(0, 1 - Math.floor(Math.log10(error))) : Infinity;
  if (decimals > 6 || Math.abs(value) >= 1e7) return `${plus(plain(value))} ± ${most}${significant(error, 2)}`;
  return `${plus(fixed(value, decimals))} ± ${most}${fixed(error, decimals)}`;
}

// Whether a number differs from 0: "changed", "unchanged" or "unknown". `critical` (Student's t) was computed in Python.
export function outcome(value, error, critical) {
  if (![value, error, critical].every(Number.isFinite)) return "unknown";
  return Math.abs(value) > critical * error ? "changed" : "unchanged";
}

// The same for a correlation, with so many decimals where its error is not known.
export function estimate(value, error, digits = 4, options = {}) {
  return withError(value, error, { plain: (number) => correlation(number, digits), ...options });
}

// A share in percent, and its error with as many digits.
export function shareEstimate(share, error, { digits = 1, atMost = false } = {}) {
  const text = percent(share, digits);
  return Number.isFinite(share + error) ? `${text.slice(0, -1)} ± ${atMost ? "at most " : ""}${percent(error, digits)}` : text;
}

// The lowest and the highest defined value; null where there is none.
export function extent(values, before = null) {
  let [low, high] = before ?? [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function niceStep(span, parts) {
  const rough = span / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function tickText(value, step) {
  if (value === 0) return "0";
  if (step < 1e-3 || step >= 1e5) return minus(String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e"));
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return minus(decimal(value, decimals));
}

// An axis over [low, high]: rounded outwards but not beyond what is possible; from 0 where that costs little room.
// Returns low, high, ticks and text(tick).
export function axisOf(range, limits = null, { zero = false, parts = 5 } = {}) {
  let [low, high] = range ?? [0, 1];
  if (zero || (low > 0 && low < high / 2)) low = Math.min(0, low);
  if (zero || (high < 0 && high > low / 2)) high = Math.max(0, high);
  if (low === high) {
    const room = Math.abs(low) / 2 || 1;
    [low, high] = [low - room, high + room];
  }
  const step = niceStep(high - low, parts);
  const ends = [Math.floor(low / step + 1e-6), Math.ceil(high / step - 1e-6)];
  const inside = (value) => Math.min(limits?.[1] ?? Infinity, Math.max(limits?.[0] ?? -Infinity, value));
  [low, high] = ends.map((end) => inside(end * step));
  const all = Array.from({ length: ends[1] - ends[0] + 1 }, (_, i) => (ends[0] + i) * step);
  const ticks = all.filter((tick) => tick >= low - step * 1e-6 && tick <= high + step * 1e-6);
  return { low, high, ticks, text: (tick) => tickText(tick, step) };
}
