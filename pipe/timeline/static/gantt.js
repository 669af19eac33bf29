// Draws the timeline itself: tracks, bars with their numbers, curves and the axis, for the range in view.

import { AXIS } from "./layout.js";
import { ticks } from "./axis.js";
import { drawLane, makePen } from "./bars.js";
import { curveOf, inBytes, scaleOf, staircase } from "./curves.js";
import { bytes, rough } from "./format.js";
import { COMPUTE, COMPUTES, KINDS, PREDICTED, SHADES, fill } from "./kinds.js";
import { nameOf, stagesOf } from "./names.js";
import { FONT, ON_BAR } from "./theme.js";
import { visible } from "./trace.js";

// scene: {traces, layout, range, left, width, height, scroll, theme, dark}. Returns counts of what was drawn.
export function drawGantt(context, scene) {
  const { theme, layout, left, width, height, scroll } = scene;
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, left + width, height);
  const seen = ({ y, height: tall }) => y + tall > scroll + AXIS && y < scroll + height;
  const marks = ticks(scene.range, width);
  const view = { range: scene.range, width };
  const pen = makePen(view),
    paler = makePen(view); // the paler one draws what was predicted
  const rows = layout.rows.filter(seen);

  context.save();
  context.translate(0, -scroll);
  drawTracks(context, scene, rows);
  drawGrid(context, scene, marks);
  context.save();
  context.beginPath();
  context.rect(left, scroll + AXIS, width, height);
  context.clip();
  context.translate(left, 0);
  for (const { lanes } of rows) {
    for (const placed of lanes) drawLane(placed.id === PREDICTED ? paler : pen, placed, room(placed));
  }
  drawBars(context, scene, pen);
  drawNumbers(context, pen, ON_BAR);
  context.globalAlpha = PALE;
  drawBars(context, scene, paler);
  context.globalAlpha = 1;
  drawNumbers(context, paler, theme.text);
  drawCurves(context, scene, pen, layout.curves.filter(seen));
  context.restore();
  drawNames(context, scene, rows);
  layout.titles.filter(seen).forEach((title) => drawTitle(context, scene, title));
  layout.curves.filter(seen).forEach((curve) => drawCurveName(context, scene, curve));
  context.restore();
  drawAxis(context, scene, marks);

  return {
    drawn: visibleActions(rows, scene.range),
    events: pen.events + paler.events,
    rectangles: pen.rectangles + paler.rectangles,
  };
}

const PALE = 0.5;

// How wide a bar must be to be looked at for a number: 0 for never.
function room({ id }) {
  return id === COMPUTE ? 8 : id === PREDICTED ? 12 : 0;
}

// How many F, B, I and W of the first step are in view, over the rows on the screen.
function visibleActions(rows, range) {
  let count = 0;
  for (const {
    which,
    lanes: [{ lane }],
  } of rows) {
    if (which > 0) continue;
    const [first, last] = visible(lane, range);
    for (let at = first; at < last; at++) count += COMPUTES.includes(KINDS[lane.code[at]].letter);
  }
  return count;
}

function drawTracks(context, { theme, left, range, width }, rows) {
  const scale = width / (range[1] - range[0]);
  context.fillStyle = theme.track;
  for (const { trace, lanes } of rows) {
    const end = Math.min(width, (trace.duration - range[0]) * scale);
    for (const { y, height, id } of lanes) if (id === COMPUTE) context.fillRect(left, y, end, height);
  }
}

function drawGrid(context, { theme, left, range, width, layout }, marks) {
  const scale = width / (range[1] - range[0]);
  context.fillStyle = theme.grid;
  for (const { time } of marks) {
    context.fillRect(left + Math.round((time - range[0]) * scale), AXIS, 1, layout.height);
  }
}

function drawBars(context, { dark }, pen) {
  for (const [style, path] of pen.paths) {
    context.fillStyle = fill(Math.floor(style / SHADES), style % SHADES, dark);
    context.fill(path);
  }
}

function drawNumbers(context, pen, color) {
  context.fillStyle = color;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [size, texts] of bySize(pen)) {
    context.font = `${size}px ${FONT}`; // set once a size: that is what costs
    for (const { text, x, y } of texts) context.fillText(text, x, y);
  }
}

// What is written, by the size of the letters: the largest that fits bar and text.
function bySize(pen) {
  const sizes = new Map(SIZES.map((size) => [size, []]));
  for (const { lane, position, x, width, placed } of pen.labels) {
    const text = textOf(lane, position);
    const left = Math.max(x, 0),
      shown = Math.min(x + width, pen.width) - left;
    const size = SIZES.find((one) => one + 1 <= placed.height && text.length * DIGIT * one + 4 <= shown);
    if (text && size)
      sizes.get(size).push({ text, x: left + shown / 2, y: placed.y + placed.height / 2 + 0.5 });
  }
  return sizes;
}

const SIZES = [13, 11, 10, 9];
const DIGIT = 0.57; // how wide a digit is, of its size: all are equally wide

// The microbatch's number; of the optimizer its name.
function textOf(lane, position) {
  if (lane.microbatch[position] >= 0) return String(lane.microbatch[position]);
  return KINDS[lane.code[position]].letter === "o" ? "optimizer" : "";
}

function drawCurves(context, { traces, theme }, pen, curves) {
  const bounds = scaleOf(traces);
  context.lineWidth = 1.25;
  for (const curve of curves) {
    const values = curveOf(traces, curve.member);
    if (values?.length) {
      context.fillStyle = theme.area;
      context.fill(staircase(curve.member, values, pen, bounds, curve, true));
      context.strokeStyle = theme.curve;
      context.stroke(staircase(curve.member, values, pen, bounds, curve, false));
    }
    const others = curve.other && curveOf(traces, curve.other);
    if (others?.length) {
      context.strokeStyle = theme.other;
      context.stroke(staircase(curve.other, others, pen, bounds, curve, false));
    }
    context.fillStyle = theme.grid;
    context.fillRect(0, curve.y + curve.height, pen.width, 1);
  }
}

function drawNames(context, { theme, left }, rows) {
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const { y, height, gap, member, trace } of rows) {
    const middle = y + (height - gap) / 2;
    const two = height - gap >= 30;
    write(context, nameOf(member, trace), 12, left - 12, two ? middle - 7 : middle, theme.text, 10);
    if (two) write(context, stagesOf(member), 11, left - 12, middle + 8, theme.quiet, 10);
  }
}

function write(context, text, size, most, y, color, x) {
  context.font = `${size}px ${FONT}`;
  context.fillStyle = color;
  context.fillText(text, x, y, most);
}

function drawTitle(context, { theme, left, width, traces }, { y, height, trace, which }) {
  context.fillStyle = theme.grid;
  if (which) context.fillRect(0, y + 4, left + width, 1);
  const middle = y + height / 2 + 3;
  if (which >= 0) {
    context.font = `600 12px ${FONT}`;
    context.fillStyle = which ? theme.other : theme.curve;
    context.fillText(`${trace.run}  ·  step ${trace.step}  ·  ${rough(trace.duration)}`, 10, middle);
    return;
  }
  const what = inBytes(traces) ? "Memory on the device" : "Live activations";
  const [least, most] = scaleOf(traces).map((value) => (inBytes(traces) ? bytes(value) : value));
  context.font = `600 12px ${FONT}`;
  context.fillStyle = theme.text;
  context.fillText(what, 10, middle);
  const used = context.measureText(what).width;
  context.font = `11px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.fillText(`each row from ${least} to ${most}`, 20 + used, middle);
}

function drawCurveName(context, { theme, left, traces }, { y, height, member }) {
  const values = curveOf(traces, member);
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  context.textBaseline = "middle";
  write(context, nameOf(member, traces[0]), 11, left - 74, y + height / 2, theme.text, 10);
  context.textAlign = "right";
  write(context, inBytes(traces) ? bytes(most) : String(most), 11, 48, y + height / 2, theme.quiet, left - 8);
  context.textAlign = "left";
}

function drawAxis(context, { theme, left, range, width }, marks) {
  const scale = width / (range[1] - range[0]);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, left + width, AXIS);
  context.fillStyle = theme.strong;
  context.fillRect(0, AXIS - 1, left + width, 1);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const { time, label } of marks) {
    const x = left + Math.round((time - range[0]) * scale);
    context.fillStyle = theme.strong;
    context.fillRect(x, AXIS - 7, 1, 6);
    context.fillStyle = theme.quiet;
    if (x + context.measureText(label).width + 4 < left + width) context.fillText(label, x + 4, AXIS / 2 - 1);
  }
}
