// A traced step as the page draws it: per member, lanes of typed arrays, made once from the server's columns.

import { CODES, COLLECTIVE, COMPUTE, COMPUTES, KINDS, PREDICTED, WAIT, shadeOf } from "./kinds.js";

// A trace: {run, step, header, members: [{rank, replica, stages, lanes: {[lane]: Lane}, ...}], summary, duration}
export function readTrace(run, answer) {
  const { header, summary } = answer;
  const members = answer.members.map((columns, number) => readMember(columns, number, header));
  // The last event may end after what the header says where a member's clock was off: show it all.
  const duration = Math.max(header.duration, ...members.map((member) => member.reach), 1);
  const letters = new Set(answer.members.flatMap((columns) => [...new Set(columns.kind)]));
  return {
    run,
    step: header.step,
    header,
    summary,
    members,
    duration,
    kinds: KINDS.filter((kind) => letters.has(kind.letter)),
    actions: members.reduce((sum, member) => sum + member.actions, 0),
    hasMemory: members.some((member) => member.memory),
    hasCollectives: letters.has("g"),
    hasPrediction: Boolean(header.predicted),
  };
}

function readMember(columns, number, header) {
  const stages = header.placement.flatMap((rank, stage) => (rank === columns.rank ? [stage] : []));
  const shades = new Map(stages.map((stage, position) => [stage, shadeOf(position, stages.length)]));
  const codes = Uint8Array.from(columns.kind, (letter) => CODES[letter]);
  const events = [...codes.keys()];
  const all = {
    code: codes,
    // Thin lanes are too thin for shades.
    shade: Uint8Array.from(
      codes,
      (code, event) => (KINDS[code].lane === COMPUTE && shades.get(columns.stage[event])) || 0,
    ),
    microbatch: Int32Array.from(columns.microbatch),
    start: columns.start,
    end: columns.end,
  };
  const lanes = {};
  for (const lane of [COMPUTE, WAIT, COLLECTIVE]) {
    lanes[lane] = makeLane(
      all,
      events.filter((event) => KINDS[codes[event]].lane === lane),
    );
  }
  const computes = events.filter((event) => COMPUTES.includes(columns.kind[event]));
  const predicted = header.predicted && {
    start: spread(events.length, computes, header.predicted.starts[number]),
    end: spread(events.length, computes, header.predicted.ends[number]),
  };
  if (predicted) lanes[PREDICTED] = makeLane({ ...all, ...predicted }, computes);
  return {
    ...columns,
    number,
    stages,
    codes,
    lanes,
    predicted,
    actions: computes.length,
    reach: columns.end.reduce((latest, end) => Math.max(latest, end), 0),
  };
}

// Values of some events, as a column over all of them.
function spread(length, events, values) {
  const column = new Float64Array(length).fill(NaN);
  events.forEach((event, position) => (column[event] = values[position]));
  return column;
}

// The events of a lane, ascending by start. `reach[i]` is the latest end of the first i + 1, which ascends even
// where events overlap: a binary search in it finds the first one that can still be seen.
function makeLane(all, events) {
  const lane = {
    length: events.length,
    event: Int32Array.from(events),
    reach: new Float64Array(events.length),
  };
  for (const [name, type] of Object.entries(COLUMNS)) {
    lane[name] = type.from(events, (event) => all[name][event]);
  }
  let latest = -Infinity;
  lane.end.forEach((end, position) => (lane.reach[position] = latest = Math.max(latest, end)));
  return lane;
}

const COLUMNS = {
  code: Uint8Array,
  shade: Uint8Array,
  microbatch: Int32Array,
  start: Float64Array,
  end: Float64Array,
};

// The positions [first, last) of a lane that a range of time can touch.
export function visible(lane, [from, to]) {
  return [firstOver(lane.reach, from), firstOver(lane.start, to)];
}

// The position of the event at a time, or of the nearest within `slack`; -1 if there is none.
export function eventAt(lane, time, slack) {
  const [first, last] = visible(lane, [time - slack, time + slack]);
  let best = -1,
    nearest = Infinity;
  for (let position = first; position < last; position++) {
    const gap = Math.max(lane.start[position] - time, time - lane.end[position], 0);
    // The last of those under the pointer: drawn last, it lies on top.
    if (gap <= slack && gap <= nearest) ((nearest = gap), (best = position));
  }
  return best;
}

// Time of each kind within a range, summed over members, with the number of events it touches.
export function totals(trace, [from, to]) {
  const time = {},
    events = {};
  for (const member of trace.members) {
    for (const id of [COMPUTE, WAIT, COLLECTIVE]) {
      const lane = member.lanes[id];
      const [first, last] = visible(lane, [from, to]);
      for (let position = first; position < last; position++) {
        const overlap = Math.min(lane.end[position], to) - Math.max(lane.start[position], from);
        if (overlap <= 0) continue;
        const { letter } = KINDS[lane.code[position]];
        time[letter] = (time[letter] ?? 0) + overlap;
        events[letter] = (events[letter] ?? 0) + 1;
      }
    }
  }
  const all = (Math.min(to, trace.duration) - Math.max(from, 0)) * trace.members.length;
  const busy = [...COMPUTES].reduce((sum, letter) => sum + (time[letter] ?? 0), 0);
  return { time, events, all, busy, idle: all - busy };
}

// The first position whose value is greater than `value`, in an ascending column.
export function firstOver(column, value) {
  let low = 0,
    high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}
