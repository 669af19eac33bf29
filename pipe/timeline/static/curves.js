// Draws what each rank holds over the step: bytes on its device, or live activations where no bytes are known.

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
  let least = Infinity, most = 1;
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
export function staircase(member, values, { range: [from, to], scale, width }, [least, most], { y, height }, closed) {
  const path = new Path2D();
  const foot = y + height;
  const level = (value) => foot - ((value - least) / (most - least)) * (height - 1);
  let position = Math.max(0, firstOver(member.start, from) - 2);
  let x = 0, value = values[position] ?? least, column = -1, peak = value;
  path.moveTo(0, closed ? foot : level(value));
  path.lineTo(0, level(value));
  for (; position < values.length && member.start[position] <= to; position++) {
    x = Math.min(Math.max(Math.round((member.end[position] - from) * scale), 0), width);
    if (x === column) {
      if (values[position] > peak) path.lineTo(x, level((peak = values[position])));
      value = values[position];
      continue;
    }
    if (values[position] === value) continue;
    path.lineTo(x, level(value));
    path.lineTo(x, level(values[position]));
    value = peak = values[position];
    column = x;
  }
  path.lineTo(Math.max(x, Math.min(width, Math.round((member.end.at(-1) - from) * scale))), level(value));
  if (closed) {
    path.lineTo(Math.max(x, Math.min(width, Math.round((member.end.at(-1) - from) * scale))), foot);
    path.closePath();
  }
  return path;
}

// What a member holds at a time.
export function valueAt(member, values, time) {
  let last = -1;
  for (let position = Math.max(0, firstOver(member.start, time) - 1); position >= 0; position--) {
    if (member.end[position] <= time) {
      last = position;
      break;
    }
  }
  return last < 0 ? 0 : values[last];
}
