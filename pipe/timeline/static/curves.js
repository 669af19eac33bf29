// Draws what each rank holds over the step: bytes on its device, or live activations where no bytes are known.

import { COLLECTIVE, KINDS } from "./kinds.js";
import { firstOver } from "./trace.js";

// Bytes, if all traces have them: steps are compared in one quantity.
export function inBytes(traces) {
  return traces.every((trace) => trace.hasMemory);
}

export function curveOf(traces, member) {
  return (inBytes(traces) ? member.memory : member.live) ?? [];
}

// [least, most] that any member holds: all curves share one scale, so that ranks compare. It begins at 0, unless
// what is held throughout (parameters, say) would leave little room for what comes and goes.
export function scaleOf(traces) {
  let least = Infinity,
    most = 1;
  for (const trace of traces) {
    for (const member of trace.members) {
      for (const value of curveOf(traces, member)) {
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
    }
  }
  return least > most / 2 && least < most ? [least - (most - least) / 10, most] : [0, most];
}

// A staircase: from the end of each event its value holds until the next one's. Where many steps share a pixel,
// the highest is drawn: peaks are what one looks for.
//
// Reductions run beside the computation, and end in any order: they make no steps of their own.
export function staircase(
  member,
  values,
  { range: [from, to], scale, width },
  [least, most],
  { y, height },
  closed,
) {
  const path = new Path2D();
  const foot = y + height;
  const level = (value) => foot - ((value - least) / (most - least)) * (height - 1);
  let position = lastEnded(member, from);
  let x = 0,
    value = values[Math.max(position, 0)] ?? 0,
    column = -1,
    peak = value;
  position = Math.max(position, 0);
  path.moveTo(0, closed ? foot : level(value));
  path.lineTo(0, level(value));
  for (; position < values.length && member.start[position] <= to; position++) {
    if (isBeside(member, position)) continue;
    x = Math.min(Math.max(Math.round((member.end[position] - from) * scale), 0), width);
    if (x === column) {
      if (values[position] > peak) path.lineTo(x, level((peak = values[position])));
      value = values[position];
      continue;
    }
    if (values[position] === value) continue;
    if (column >= 0) path.lineTo(column, level(value)); // down from the peak, where the column ends lower
    path.lineTo(x, level(value));
    path.lineTo(x, level(values[position]));
    value = peak = values[position];
    column = x;
  }
  const end = Math.max(x, Math.min(width, Math.round((member.reach - from) * scale)));
  if (column >= 0) path.lineTo(column, level(value));
  path.lineTo(end, level(value));
  if (closed) {
    path.lineTo(end, foot);
    path.closePath();
  }
  return path;
}

// What a member holds at a time.
export function valueAt(member, values, time) {
  return values[lastEnded(member, time)] ?? 0;
}

// The last event of the member's own thread that has ended by a time; -1 if none has.
function lastEnded(member, time) {
  let position = firstOver(member.start, time) - 1;
  while (position >= 0 && (member.end[position] > time || isBeside(member, position))) position--;
  return position;
}

function isBeside(member, position) {
  return KINDS[member.codes[position]].lane === COLLECTIVE;
}
