// Moves the range in view: it is null for the whole step, so that a longer one is still seen whole.

import { panned, within, zoomed } from "./range.js";

// The time axis reaches over both steps that are shown.
export function wholeOf({ trace, compare }) {
  return Math.max(trace.duration, compare?.trace?.duration ?? 0);
}

export function rangeOf(state) {
  const whole = wholeOf(state);
  return state.range ? within(state.range, whole) : [0, whole];
}

// moved(): the state's range has changed; pointed(): the time under the pointer, or null.
export function createMoving(state, moved, pointed) {
  function set(wanted) {
    if (!state.trace) return;
    const whole = wholeOf(state);
    const range = wanted && within(wanted, whole);
    state.range = range && range[1] - range[0] < whole ? range : null;
    moved();
  }

  return {
    set,
    zoom(factor) {
      if (!state.trace) return;
      const range = rangeOf(state);
      set(zoomed(range, factor, pointed() ?? (range[0] + range[1]) / 2, wholeOf(state)));
    },
    pan(share) {
      if (!state.trace) return;
      const range = rangeOf(state);
      set(panned(range, share * (range[1] - range[0]), wholeOf(state)));
    },
    toSelection: () => state.selection && set(state.selection),
  };
}
