// The box at the pointer: what an event was, to the tenth of a microsecond, beside what was predicted.

import { h } from "./dom.js";
import { curveOf, inBytes, valueAt } from "./curves.js";
import { bytes, count, exact, signed } from "./format.js";
import { KINDS, fill } from "./kinds.js";
import { nameOf } from "./names.js";

const VALUES = { a: "activation", g: "gradient" };

// The numbers of an event: what the box shows, and what tests read.
export function factsOf(trace, member, event) {
  const start = member.start[event],
    end = member.end[event];
  const facts = {
    run: trace.run,
    step: trace.step,
    member: member.number,
    rank: member.rank,
    replica: member.replica,
    event,
    kind: member.kind[event],
    stage: member.stage[event],
    microbatch: member.microbatch[event],
    peer: member.peer[event],
    value: member.value[event],
    start,
    end,
    duration: tenths(end - start),
    predicted: null,
  };
  const from = member.predicted?.start[event],
    to = member.predicted?.end[event];
  if (from >= 0) {
    const duration = tenths(to - from);
    facts.predicted = {
      start: from,
      end: to,
      duration,
      delta: tenths(facts.duration - duration),
      late: tenths(end - to),
    };
  }
  return facts;
}

// Times are tenths of a microsecond; differences of floats are not quite.
function tenths(us) {
  return Math.round(us * 10) / 10;
}

export function createTooltip() {
  const element = h("div", { class: "tooltip", role: "tooltip", hidden: true });

  // Under what must stay to be seen, `clear` (both ends of arrows, say), else above it, else beside the pointer.
  function put(x, clear, frame) {
    element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = element;
    const below = clear.bottom + 10,
      above = clear.top - height - 10;
    const y = below + height < frame.bottom ? below : above > frame.top ? above : frame.bottom - height - 8;
    element.style.left = `${x + 18 + width > frame.right ? Math.max(x - width - 18, 4) : x + 18}px`;
    element.style.top = `${y}px`;
  }

  return {
    element,
    hide: () => (element.hidden = true),
    showEvent(trace, member, event, flows, dark, x, clear, frame) {
      element.replaceChildren(...eventBox(trace, member, event, flows, dark));
      put(x, clear, frame);
    },
    showCurve(traces, curve, time, x, clear, frame) {
      element.replaceChildren(...curveBox(traces, curve, time));
      put(x, clear, frame);
    },
  };
}

function eventBox(trace, member, event, flows, dark) {
  const facts = factsOf(trace, member, event);
  const kind = KINDS[member.codes[event]];
  const swatch = h("span", { class: "swatch", style: `background: ${fill(member.codes[event], 0, dark)}` });
  const lines = [
    h("h3", {}, swatch, titleOf(kind, facts)),
    h("p", { class: "where" }, whereOf(trace, member, facts)),
  ];
  lines.push(timesOf(facts));
  const notes = flows.map(({ from, to, into, value }) =>
    into
      ? `← ${VALUES[value]} from ${nameOf(from.member, trace)}: sent ${exact(from.time)}, taken ${exact(to.time)}`
      : `→ ${VALUES[value]} to ${nameOf(to.member, trace)}: sent ${exact(from.time)}, taken ${exact(to.time)}`,
  );
  lines.push(...notes.map((note) => h("p", { class: "flow" }, note)));
  const held = member.memory ? `${bytes(member.memory[event])} on the device, ` : "";
  lines.push(h("p", { class: "after" }, `after it: ${held}${member.live[event]} live`));
  return lines;
}

function titleOf(kind, facts) {
  if (facts.kind === "r") return `waiting for the ${VALUES[facts.value] ?? "value"} from rank ${facts.peer}`;
  if (facts.kind === "s") return `held up by a send to rank ${facts.peer}`;
  return facts.microbatch < 0 ? kind.name : `${kind.name}, microbatch ${facts.microbatch}`;
}

function whereOf({ header }, member, { stage, microbatch, kind }) {
  const parts = [nameOf(member, { header })];
  if (stage >= 0) {
    const [start, stop] = header.layers[stage];
    parts.unshift(`stage ${stage}`);
    parts.push(
      stop - start > 1 ? `layers ${start}-${stop}` : `layer ${header.layer_names[start] ?? start}`,
    );
  }
  if ("rs".includes(kind) && microbatch >= 0) parts.unshift(`microbatch ${microbatch}`);
  return parts.join(" · ");
}

function timesOf({ start, end, duration, predicted }) {
  const row = (name, measured, guess) =>
    h(
      "tr",
      {},
      h("th", {}, name),
      h("td", {}, exact(measured)),
      ...(predicted ? [h("td", {}, exact(guess)), h("td", {}, signed(measured - guess))] : []),
    );
  const head = predicted
    ? [h("tr", {}, ...["", "measured", "predicted", "delta"].map((name) => h("th", {}, name)))]
    : [];
  return h(
    "table",
    {},
    ...head,
    row("start", start, predicted?.start),
    row("end", end, predicted?.end),
    row("duration", duration, predicted?.duration),
  );
}

function curveBox(traces, curve, time) {
  const lines = [h("h3", {}, `${nameOf(curve.member, traces[0])} at ${exact(time)}`)];
  for (const [which, member] of [curve.member, curve.other].entries()) {
    if (!member) continue;
    const values = curveOf(traces, member);
    const value = valueAt(member, values, time);
    const text = inBytes(traces) ? bytes(value) : count(value, "live activation");
    lines.push(
      h("p", {}, traces.length > 1 ? `${traces[which].run}, step ${traces[which].step}: ${text}` : text),
    );
  }
  return lines;
}
