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
  const names = traces.flatMap((trace) => trace.members.flatMap((member) => [nameOf(member, trace), stagesOf(member)]));
  const widest = names.reduce((most, name) => Math.max(most, measure.measureText(name).width), 0);
  return Math.min(Math.max(Math.ceil(widest) + 24, 110), 170);
}
