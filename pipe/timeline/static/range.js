// Which part of the step is in view? Pure functions of ranges [from, to], in microseconds.

const SHORTEST = 0.5; // half a microsecond over the whole width: traces hold tenths

export function zoomed([from, to], factor, around, whole) {
  const length = Math.min(Math.max((to - from) / factor, SHORTEST), whole);
  const share = (around - from) / (to - from);
  return within([around - share * length, around + (1 - share) * length], whole);
}

export function panned([from, to], by, whole) {
  return within([from + by, to + by], whole);
}

// Moves a range back into [0, whole], and cuts what is longer.
export function within([from, to], whole) {
  const length = Math.min(Math.max(to - from, SHORTEST), whole);
  const start = Math.min(Math.max(from, 0), whole - length);
  return [start, start + length];
}

export function isWhole([from, to], whole) {
  return from <= 0 && to >= whole;
}
