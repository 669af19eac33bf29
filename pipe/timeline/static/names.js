// What rows are called, and how much room their names take.

import { FONT } from "./theme.js";

export function nameOf(member, { header }) {
  return `rank ${member.rank}` + (header.replicas > 1 ? `, replica ${member.replica}` : "");
}

export function stagesOf({ stages }) {
  return stages.length > 1 ? `stages ${stages.join(", ")}` : `stage ${stages[0]}`;
}

const measure = document.createElement("canvas").getContext("2d");

export function namesWidth(traces) {
  measure.font = `12px ${FONT}`;
  const names = (trace) => trace.members.flatMap((member) => [nameOf(member, trace), stagesOf(member)]);
  // Curves have smaller names, and what they reach beside them.
  const beside = (trace) => trace.members.map((member) => `${nameOf(member, trace)} 1.234 GiB`);
  const widest = [...traces.flatMap(names), ...beside(traces[0])].reduce(
    (most, name) => Math.max(most, measure.measureText(name).width),
    0,
  );
  return Math.min(Math.max(Math.ceil(widest) + 20, 110), 180);
}
