// Owns the canvases: their size, when a frame is drawn, and what lies under a point of them.

import { h } from "./dom.js";
import { drawGantt } from "./gantt.js";
import { COLLECTIVE, COMPUTE, PREDICTED, WAIT } from "./kinds.js";
import { AXIS, layOut } from "./layout.js";
import { drawMarks } from "./marks.js";
import { namesWidth } from "./names.js";
import { HEIGHT, drawStrip, drawWindow } from "./overview.js";
import { THEMES } from "./theme.js";
import { eventAt } from "./trace.js";

const SLACK = 3; // pixels by which a thin bar may be missed

export function createChart(framed) {
  const overview = h("canvas", { class: "overview", "aria-label": "The whole step, with the range in view" });
  const bars = h("canvas", { class: "bars" });
  const marks = h("canvas", {
    class: "marks",
    tabindex: "0",
    role: "img",
    "aria-label": "Timeline of the step",
  });
  const sheet = h("div", { class: "sheet" }, bars, marks);
  const spacer = h("div", { class: "spacer" }, sheet);
  const viewport = h("div", { class: "viewport" }, spacer);
  const strip = h("div", { class: "strip" }, overview);
  const element = h("div", { class: "chart" }, strip, viewport);
  const backdrop = document.createElement("canvas");

  const chart = { element, overview, bars, marks, viewport, strip, scene: null, frames: [] };
  let shown = null,
    marked = {},
    pending = 0,
    stale = false,
    counts = {},
    stripKey = "";

  // state: {traces, range, whole, predicted, dark}
  chart.show = (state) => {
    shown = state;
    chart.scene = makeScene(state);
    stale = true;
    schedule();
  };
  chart.mark = (what) => {
    marked = what;
    schedule();
  };
  chart.rescale = () => shown && chart.show(shown);

  // Draws at once, and waits until the pixels are there; returns the milliseconds. For tests.
  chart.measure = () => {
    const before = performance.now();
    stale = true;
    frame();
    bars.getContext("2d").getImageData(0, 0, 1, 1);
    return performance.now() - before;
  };

  function makeScene({ traces, range, whole, predicted, dark }) {
    const left = namesWidth(traces);
    const height = viewport.clientHeight;
    const layout = layOut(traces, { height, predicted });
    spacer.style.height = `${Math.max(layout.height, height)}px`;
    // Read after the height is set: a scroll bar takes its width.
    const width = Math.max(viewport.clientWidth - left, 50);
    return {
      traces,
      range,
      whole,
      dark,
      layout,
      left,
      width,
      height,
      scroll: viewport.scrollTop,
      theme: THEMES[dark ? "dark" : "light"],
    };
  }

  function schedule() {
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      if (!chart.scene) return;
      frame();
      framed(chart, counts);
    });
  }

  function frame() {
    const { scene } = chart;
    // Where only the pointer moved, the bars stay as they are.
    if (stale) {
      const before = performance.now();
      counts = drawGantt(sized(bars, scene.left + scene.width, scene.height), scene);
      drawOverview(scene);
      stale = false;
      chart.frames.push(performance.now() - before);
      if (chart.frames.length > 50) chart.frames.shift();
    }
    drawMarks(sized(marks, scene.left + scene.width, scene.height), scene, placedMarks(scene, marked));
  }

  function drawOverview(scene) {
    const {
      left,
      width,
      traces: [trace],
      whole,
      dark,
    } = scene;
    strip.style.paddingLeft = `${left}px`;
    const key = [trace.run, trace.step, trace.header.wall_time, whole, width, dark].join();
    if (key !== stripKey) {
      drawStrip(sized(backdrop, width, HEIGHT), { ...scene, trace });
      stripKey = key;
    }
    const context = sized(overview, width, HEIGHT);
    context.drawImage(backdrop, 0, 0, width, HEIGHT);
    drawWindow(context, scene);
  }

  chart.timeAt = (x) => {
    const {
      range: [from, to],
      left,
      width,
    } = chart.scene;
    return from + ((x - left) / width) * (to - from);
  };
  chart.xOf = (time) => xOf(chart.scene, time);
  chart.point = ({ clientX, clientY }) => {
    const box = marks.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  };

  // What is under a point: {row, placed, event}, {curve}, or null.
  chart.under = (x, y) => {
    const { scene } = chart;
    if (!scene || x < scene.left || y < AXIS) return null;
    const down = y + scene.scroll;
    const within = (one) => down >= one.y && down < one.y + one.height;
    const curve = scene.layout.curves.find(within);
    if (curve) return { curve };
    const row = scene.layout.rows.find(within);
    const placed = row?.lanes.find((one) => down >= one.y - 1 && down < one.y + one.height + 1);
    if (!placed) return null;
    const slack = (SLACK * (scene.range[1] - scene.range[0])) / scene.width;
    const position = eventAt(placed.lane, chart.timeAt(x), slack);
    return position < 0 ? null : { row, placed, event: placed.lane.event[position] };
  };

  // From the top of the first of some members' rows to the bottom of the last.
  chart.extent = (which, members) => {
    const { layout, scroll } = chart.scene;
    const rows = layout.rows.filter((row) => row.which === which && members.includes(row.member));
    return { top: rows[0].y - scroll, bottom: rows.at(-1).y + rows.at(-1).height - rows[0].gap - scroll };
  };

  // Where an event is on the page: {x, y} of its bar's middle, in the window's coordinates.
  chart.place = (number, event, { which = 0, predicted = false } = {}) => {
    const { scene } = chart;
    const bar = barOf(
      scene,
      scene.layout.rows.find((row) => row.which === which && row.member.number === number),
      event,
      predicted,
    );
    const box = marks.getBoundingClientRect();
    return { x: box.left + bar.x + bar.width / 2, y: box.top + bar.y - scene.scroll + bar.height / 2 };
  };

  viewport.addEventListener("scroll", () => chart.rescale());
  new ResizeObserver(() => chart.rescale()).observe(viewport);
  return chart;
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function xOf({ range: [from, to], left, width }, time) {
  return left + ((time - from) / (to - from)) * width;
}

// The rectangle of an event's bar, y counted from the top of the sheet that scrolls.
function barOf(scene, row, event, predicted = false) {
  const wanted = predicted
    ? PREDICTED
    : [COMPUTE, WAIT, COLLECTIVE].find((id) => row.member.lanes[id].event.includes(event));
  const placed = row.lanes.find(({ id }) => id === wanted);
  const position = placed.lane.event.indexOf(event);
  const x = xOf(scene, placed.lane.start[position]);
  return { x, y: placed.y, width: xOf(scene, placed.lane.end[position]) - x, height: placed.height };
}

// Turns what is marked, by event and time, into places.
function placedMarks(scene, { hovered, flows = [], selection = null, pointer = null }) {
  if (!hovered?.row) return { hovered: null, flows: [], selection, pointer };
  const { which } = hovered.row;
  const rows = new Map(
    scene.layout.rows.filter((row) => row.which === which).map((row) => [row.member.number, row]),
  );
  const row = rows.get(hovered.row.member.number);
  if (!row) return { hovered: null, flows: [], selection, pointer };
  const end = ({ member, time }) => {
    const {
      lanes: [{ y, height }],
    } = rows.get(member.number);
    return [xOf(scene, time), y + height / 2];
  };
  return {
    hovered: barOf(scene, row, hovered.event, hovered.placed.id === PREDICTED),
    flows: flows.map((flow) => ({ from: end(flow.from), to: end(flow.to), into: flow.into })),
    selection,
    pointer,
  };
}
