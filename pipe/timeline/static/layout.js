// Where does everything stand on the canvas? From traces and a size to rows of lanes, sections and curves.
//
//     ┌ AXIS ──────────────────────────────┐
//     │ title of a section                 │   only when two steps are compared
//     │ rank 0  ▇▇▇▇▇▇ ▇▇▇▇▇▇   compute    │
//     │         ▁▁▁▁▁▁▁▁▁▁▁▁▁   wait       │   thin
//     │         ▁▁▁▁▁▁▁▁▁▁▁▁▁   collective │   thin, where a trace has any
//     │         ▆▆▆▆▆▆▆▆▆▆▆▆▆   predicted  │   when asked for
//     │ rank 1  ...                        │
//     │ title of the curves                │
//     │ rank 0  ▁▂▃▄▅▅▄▃▂▁                 │
//     └────────────────────────────────────┘
//
// Rows grow with the room there is; where the smallest ones do not fit, the canvas scrolls.

import { COLLECTIVE, COMPUTE, PREDICTED, WAIT } from "./kinds.js";

export const AXIS = 26;
const TITLE = 26;
const BAR = [13, 60]; // the height of bars, least and most
const CURVE = [13, 60];
const TALLEST = 170; // of a curve, where there is room to spare
const BOTTOM = 10;

// How high a lane is for bars of a height, and the room above it.
const LANE = {
  [COMPUTE]: { height: (bar) => bar, above: 0 },
  [WAIT]: { height: (bar) => Math.max(4, Math.round(bar / 5)), above: 1 },
  [COLLECTIVE]: { height: (bar) => Math.max(4, Math.round(bar / 5)), above: 1 },
  [PREDICTED]: { height: (bar) => Math.max(9, Math.round(bar * 0.7)), above: 2 },
};

// traces: one or two. {rows, titles, curves, height}, y counted from the top of the axis.
export function layOut(traces, { height, predicted }) {
  const curves = traces[0].members.length;
  let bar = BAR[1];
  while (bar > BAR[0] && heightOf(traces, predicted, bar, curves * curveHeight(bar)) > height) bar--;
  const spare = height - heightOf(traces, predicted, bar, curves * curveHeight(bar));
  const taller = curveHeight(bar) + Math.max(0, Math.floor(spare / curves));
  return place(traces, predicted, bar, Math.max(curveHeight(bar), Math.min(taller, TALLEST)));
}

function curveHeight(bar) {
  const share = (bar - BAR[0]) / (BAR[1] - BAR[0]);
  return Math.round(CURVE[0] + share * (CURVE[1] - CURVE[0]));
}

function heightOf(traces, predicted, bar, curves) {
  const rows = traces.reduce(
    (sum, trace) => sum + trace.members.length * rowHeight(trace, predicted, bar),
    0,
  );
  return AXIS + (traces.length > 1 ? TITLE * traces.length : 6) + rows + TITLE + curves + BOTTOM;
}

function lanesOf(trace, predicted) {
  const lanes = [COMPUTE, WAIT];
  if (trace.hasCollectives) lanes.push(COLLECTIVE);
  if (predicted && trace.hasPrediction) lanes.push(PREDICTED);
  return lanes;
}

// Predicted bars, the last lane of a row, need more room to be seen as its own, not as the next one's.
function gapBelow(trace, predicted, bar) {
  return Math.max(predicted && trace.hasPrediction ? 7 : 3, Math.round(bar / 4));
}

function rowHeight(trace, predicted, bar) {
  const lanes = lanesOf(trace, predicted).map((lane) => LANE[lane].above + LANE[lane].height(bar));
  return lanes.reduce((sum, one) => sum + one, gapBelow(trace, predicted, bar));
}

function place(traces, predicted, bar, curve) {
  const rows = [],
    titles = [],
    curves = [];
  let y = AXIS + 6;
  for (const [which, trace] of traces.entries()) {
    if (traces.length > 1) {
      y = which ? y : AXIS;
      titles.push({ y, height: TITLE, trace, which });
      y += TITLE;
    }
    for (const member of trace.members) {
      const height = rowHeight(trace, predicted, bar),
        gap = gapBelow(trace, predicted, bar);
      rows.push({
        y,
        height,
        gap,
        which,
        trace,
        member,
        lanes: placeLanes(trace, member, predicted, bar, y),
      });
      y += height;
    }
  }
  titles.push({ y, height: TITLE, trace: traces[0], which: -1 });
  y += TITLE;
  for (const [number, member] of traces[0].members.entries()) {
    curves.push({ y, height: curve - 2, member, other: traces[1]?.members[number] });
    y += curve;
  }
  return { rows, titles, curves, bar, height: y + BOTTOM };
}

function placeLanes(trace, member, predicted, bar, y) {
  return lanesOf(trace, predicted).map((id) => {
    const { height, above } = LANE[id];
    const placed = { id, lane: member.lanes[id], y: y + above, height: height(bar) };
    y += above + placed.height;
    return placed;
  });
}
