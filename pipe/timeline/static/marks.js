// Draws what follows the pointer, on a canvas of its own above the bars: hovering costs no frame of the Gantt.

import { AXIS } from "./layout.js";

// marks: {hovered: {x, y, width, height}, flows: [{from: [x, y], to: [x, y], into}], selection, pointer}
export function drawMarks(context, scene, { hovered, flows, selection, pointer }) {
  const { left, width, height, theme, scroll } = scene;
  context.clearRect(0, 0, left + width, height);
  context.save();
  context.beginPath();
  context.rect(left, 0, width, height);
  context.clip();
  if (selection) drawSelection(context, scene, selection);
  if (pointer !== null) {
    context.fillStyle = theme.strong;
    context.fillRect(Math.round(pointer), AXIS, 1, height);
  }
  context.beginPath();
  context.rect(left, AXIS, width, height);
  context.clip();
  context.translate(0, -scroll);
  if (hovered) drawOutline(context, theme, hovered);
  flows.forEach((flow) => drawArrow(context, theme, flow));
  context.restore();
}

function drawSelection(context, { left, width, range, theme, height }, [from, to]) {
  const scale = width / (range[1] - range[0]);
  const x = left + (from - range[0]) * scale,
    end = left + (to - range[0]) * scale;
  context.fillStyle = theme.accentArea;
  context.fillRect(x, 0, end - x, height);
  context.fillStyle = theme.accent;
  context.fillRect(Math.round(x), 0, 1, height);
  context.fillRect(Math.round(end) - 1, 0, 1, height);
}

function drawOutline(context, theme, { x, y, width, height }) {
  context.strokeStyle = theme.outline;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, Math.max(width, 1) + 2, height + 2);
}

// A curve that leaves to the right and arrives from the left, on a rim of paper that parts it from the bars.
function drawArrow(context, theme, { from: [x0, y0], to: [x1, y1], into }) {
  const bend = Math.max(18, Math.abs(x1 - x0) / 2);
  const path = new Path2D();
  path.moveTo(x0, y0);
  path.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
  const head = new Path2D();
  head.moveTo(x1 + 1, y1);
  head.lineTo(x1 - 8, y1 - 5);
  head.lineTo(x1 - 8, y1 + 5);
  head.closePath();
  context.strokeStyle = theme.paper;
  context.lineWidth = 5;
  context.stroke(path);
  context.lineWidth = 3;
  context.stroke(head);
  context.strokeStyle = context.fillStyle = into ? theme.into : theme.out;
  context.lineWidth = 2;
  context.stroke(path);
  context.fill(head);
  context.beginPath();
  context.arc(x0, y0, 3, 0, 2 * Math.PI);
  context.fill();
}
