// What the pointer is at: marks it on the chart, and tells of it in a box.

import { flowsOf } from "./flows.js";
import { createTooltip, factsOf } from "./tooltip.js";

// pointed(facts): of the event under the pointer, with its flows; null where there is none.
export function createPointing(chart, state, pointed) {
  const tooltip = createTooltip();
  let pointer = null; // [x, y] on the chart

  function at(under, x, y) {
    pointer = x === null ? null : [x, y];
    if (under?.row) atEvent(under, x);
    else atNothing(under?.curve, x, y);
  }

  function atEvent(under, x) {
    const { event, row } = under;
    const { trace, member, which } = row;
    const flows = flowsOf(trace, member, event);
    pointed({ ...factsOf(trace, member, event), flows: flows.map(told) });
    mark({ hovered: under, flows });
    const ends = flows.flatMap(({ from, to }) => [from.member, to.member]);
    const clear = chart.extent(which, [member, ...ends]);
    tooltip.showEvent(trace, member, event, flows, state.dark, ...inWindow(x, clear));
  }

  function atNothing(curve, x, y) {
    pointed(null);
    mark({});
    if (!curve) return tooltip.hide();
    tooltip.showCurve(chart.scene.traces, curve, chart.timeAt(x), ...inWindow(x, { top: y, bottom: y }));
  }

  function mark(what) {
    chart.mark({ selection: state.selection, pointer: pointer && pointer[0], ...what });
  }

  // From the chart's coordinates to the window's: x, a span to keep clear, and the frame to keep within.
  function inWindow(x, { top, bottom }) {
    const box = chart.marks.getBoundingClientRect();
    const frame = { top: 0, right: box.right, bottom: window.innerHeight };
    return [box.left + x, { top: box.top + top, bottom: box.top + bottom }, frame];
  }

  return {
    element: tooltip.element,
    at,
    time: () => (pointer ? chart.timeAt(pointer[0]) : null),
    // Something else is under the pointer now: the range moved, or another step is shown.
    again: () => at(pointer && chart.under(...pointer), ...(pointer ?? [null, null])),
  };
}

// A flow without the objects that it joins.
function told({ from, to, value, into }) {
  const end = ({ member, event, time }) => ({ rank: member.rank, replica: member.replica, event, time });
  return { from: end(from), to: end(to), value, into };
}
