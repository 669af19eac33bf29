// Turns numbers into words: times are in microseconds wherever the page computes with them.

const UNITS = [
  [1e6, "s"],
  [1e3, "ms"],
  [1, "µs"],
];

export function unitOf(us) {
  return UNITS.find(([size]) => Math.abs(us) >= size) ?? UNITS[2];
}

// Three digits or so, for panels: 532 µs, 12.3 ms, 1.23 s.
export function rough(us) {
  const [size, unit] = unitOf(us);
  return `${digits(us / size, 3)} ${unit}`;
}

// All that a trace holds, tenths of a microsecond: 12.3456 ms.
export function exact(us) {
  if (Math.abs(us) < 1e3) return `${us.toFixed(1)} µs`;
  return `${(us / 1e3).toFixed(4)} ms`;
}

export function signed(us, write = exact) {
  return (us > 0 ? "+" : us < 0 ? "−" : "±") + write(Math.abs(us));
}

export function percent(fraction, places = 1) {
  return `${(100 * fraction).toFixed(places)} %`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) ((value /= 1024), unit++);
  return `${digits(value, 4)} ${units[unit]}`;
}

export function count(value, noun) {
  return `${value} ${noun}${value === 1 ? "" : "s"}`;
}

function digits(value, significant) {
  const whole = Math.floor(Math.log10(Math.max(Math.abs(value), 1e-9))) + 1;
  return value.toFixed(value === 0 ? 0 : Math.max(0, significant - Math.max(whole, 1)));
}
