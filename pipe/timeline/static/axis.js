// Where the ticks of a time axis stand, and what is written at them.

import { unitOf } from "./format.js";

const APART = 96; // pixels between ticks, at least

export function ticks([from, to], width) {
  const step = roundUp(((to - from) * APART) / Math.max(width, APART));
  const [size, unit] = unitOf(Math.max(to, step));
  const places = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  const found = [];
  for (let number = Math.ceil(from / step - 1e-9); number * step <= to; number++) {
    const time = number * step;
    found.push({ time, label: time === 0 ? "0" : `${(time / size).toFixed(places)} ${unit}` });
  }
  return found;
}

// The next number of the form 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((digit) => digit * power >= value * (1 - 1e-9)) * power;
}
