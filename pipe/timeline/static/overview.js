// The whole step in a strip above the axis, with the range in view as a window: the page's scroll bar.

import { drawLane, makePen } from "./bars.js";
import { COMPUTE, SHADES, fill } from "./kinds.js";

export const HEIGHT = 44;
const PAD = 4;

// The strip without its window: drawn once for a trace and size, then copied.
export function drawStrip(context, { trace, whole, width, dark, theme }) {
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, HEIGHT);
  const pen = makePen({ range: [0, whole], width });
  const row = (HEIGHT - 2 * PAD) / trace.members.length;
  for (const [number, member] of trace.members.entries()) {
    const height = Math.max(1, Math.min(row - (row > 3 ? 1 : 0), 12));
    const y = PAD + number * row + (row - height) / 2;
    context.fillStyle = theme.track;
    context.fillRect(0, y, (width * trace.duration) / whole, height);
    drawLane(pen, { lane: member.lanes[COMPUTE], y, height }, 0);
  }
  for (const [style, path] of pen.paths) {
    context.fillStyle = fill(Math.floor(style / SHADES), style % SHADES, dark);
    context.fill(path);
  }
}

export function drawWindow(context, { range: [from, to], whole, width, theme }) {
  const x = (from / whole) * width,
    end = Math.max((to / whole) * width, x + 3);
  context.fillStyle = theme.shadow;
  context.fillRect(0, 0, x, HEIGHT);
  context.fillRect(end, 0, width - end, HEIGHT);
  context.strokeStyle = theme.accent;
  context.lineWidth = 2;
  context.strokeRect(x + 1, 1, Math.max(end - x - 2, 1), HEIGHT - 2);
}
