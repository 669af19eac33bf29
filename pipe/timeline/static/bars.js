// Gathers the bars of lanes into one Path2D per kind and shade, so that a frame is a handful of fills.
//
// Bars stand on whole pixels. Those narrower than one are gathered by the column that their middle falls into,
// and each column shows the kind that fills most of it: at most one rectangle a column, however many events. In
// thin lanes a column stays free if less than a third of it is filled: waits too short to see would otherwise
// add up to a rank that seems to wait all the time.

import { visible } from "./trace.js";
import { COLLECTIVE, SHADES, WAIT } from "./kinds.js";

const ROUND = 9; // bars at least so wide and high have round corners
const APART = 4; // from this width on a pixel is left free between bars
const LEAST = 1 / 3;

// A pen that draws lanes for a view: {range: [from, to], width}. `paths` by style (code * SHADES + shade);
// `labels` of bars that may have room for a text; counts of what was drawn.
export function makePen(view) {
  return {
    ...view,
    scale: view.width / (view.range[1] - view.range[0]),
    paths: new Map(),
    labels: [],
    events: 0,
    rectangles: 0,
  };
}

export function drawLane(pen, placed, labelled) {
  const { id, lane, y, height } = placed;
  const {
    range: [from],
    scale,
    width,
  } = pen;
  const [first, last] = visible(lane, pen.range);
  const thin = new Columns(pen, y, height, id === WAIT || id === COLLECTIVE ? LEAST : 0);
  for (let position = first; position < last; position++) {
    const left = (lane.start[position] - from) * scale;
    const right = (lane.end[position] - from) * scale;
    const style = lane.code[position] * SHADES + lane.shade[position];
    if (right - left < 1) {
      thin.add(Math.floor((left + right) / 2), style, right - left);
      continue;
    }
    thin.flush();
    const x = Math.round(Math.max(left, -ROUND));
    const end = Math.max(Math.round(Math.min(right, width + ROUND)), x + 1);
    rectangle(pen, style, x, y, end - x >= APART ? end - x - 1 : end - x, height);
    if (labelled && end - x >= labelled) pen.labels.push({ lane, position, x, width: end - x - 1, placed });
  }
  thin.flush();
  pen.events += last - first;
}

function rectangle(pen, style, x, y, width, height) {
  let path = pen.paths.get(style);
  if (!path) pen.paths.set(style, (path = new Path2D()));
  if (width >= ROUND && height >= ROUND) path.roundRect(x, y, width, height, 2);
  else path.rect(x, y, width, height);
  pen.rectangles++;
}

// Columns of one pixel, joined while neighbours show the same style.
class Columns {
  constructor(pen, y, height, least) {
    Object.assign(this, { pen, y, height, least, column: NaN, shares: new Map(), run: null });
  }

  add(column, style, share) {
    if (column !== this.column) this.close();
    this.column = column;
    this.shares.set(style, (this.shares.get(style) ?? 0) + share);
  }

  close() {
    if (!this.shares.size) return;
    let style = -1,
      most = -1,
      all = 0;
    for (const [one, share] of this.shares) {
      if (share > most) ((most = share), (style = one));
      all += share;
    }
    this.shares.clear();
    if (all < this.least) return;
    if (this.run?.style === style && this.run.end === this.column) {
      this.run.end++;
      return;
    }
    this.draw();
    this.run = { style, start: this.column, end: this.column + 1 };
  }

  flush() {
    this.close();
    this.draw();
    this.column = NaN;
  }

  draw() {
    if (this.run)
      rectangle(this.pen, this.run.style, this.run.start, this.y, this.run.end - this.run.start, this.height);
    this.run = null;
  }
}
