// Turns what the mouse does on the chart into intents: zoom, pan, select, hover.
//
//     wheel                    zoom around the pointer; over the names it scrolls, as everywhere
//     shift + wheel, sideways  pan
//     drag                     select a range
//     shift, alt + drag        pan; the middle button too
//     double click             the whole step

import { HEIGHT } from "./overview.js";
import { panned, zoomed } from "./range.js";

const MOVED = 4; // pixels that make a click a drag

// on: {range(range), select(range | null), hover(under | null, x, y)}
export function followPointer(chart, on) {
  const { marks, overview } = chart;
  let drag = null;

  marks.addEventListener(
    "wheel",
    (event) => {
      const { scene } = chart;
      const [x] = chart.point(event);
      if (!scene || x < scene.left) return;
      event.preventDefault();
      const length = scene.range[1] - scene.range[0];
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        on.range(panned(scene.range, (sideways / scene.width) * length, scene.whole));
      } else {
        on.range(zoomed(scene.range, Math.exp(-event.deltaY / 400), chart.timeAt(x), scene.whole));
      }
    },
    { passive: false },
  );

  marks.addEventListener("pointerdown", (event) => {
    const [x] = chart.point(event);
    if (!chart.scene || event.button > 1 || x < chart.scene.left) return;
    const pans = event.button === 1 || event.shiftKey || event.altKey;
    drag = { pans, x, from: chart.timeAt(x), range: chart.scene.range, moved: false };
    marks.setPointerCapture(event.pointerId);
    marks.focus({ preventScroll: true });
    event.preventDefault();
  });

  marks.addEventListener("pointermove", (event) => {
    if (!chart.scene) return;
    const [x, y] = chart.point(event);
    if (!drag) return on.hover(chart.under(x, y), x, y);
    drag.moved ||= Math.abs(x - drag.x) >= MOVED;
    if (!drag.moved) return;
    on.hover(null, null, null); // no box in the way of a drag
    if (drag.pans) {
      const length = drag.range[1] - drag.range[0];
      on.range(panned(drag.range, ((drag.x - x) / chart.scene.width) * length, chart.scene.whole));
      marks.classList.add("panning");
    } else {
      const to = Math.min(Math.max(chart.timeAt(x), 0), chart.scene.whole);
      on.select(drag.from < to ? [drag.from, to] : [to, drag.from]);
    }
  });

  const release = () => {
    if (drag && !drag.moved && !drag.pans) on.select(null);
    drag = null;
    marks.classList.remove("panning");
  };
  marks.addEventListener("pointerup", release);
  marks.addEventListener("pointercancel", release);
  marks.addEventListener("pointerleave", () => drag || on.hover(null, null, null));
  marks.addEventListener("dblclick", () => on.range(null));

  // In the overview: the window goes where the pointer is, or is drawn up by dragging from outside of it.
  overview.style.height = `${HEIGHT}px`;
  overview.addEventListener("pointerdown", (event) => {
    if (!chart.scene) return;
    overview.setPointerCapture(event.pointerId);
    const {
      range: [from, to],
    } = chart.scene;
    const time = overviewTime(event);
    const grip = time >= from && time <= to ? time - from : (to - from) / 2;
    const move = (moved) => {
      const start = overviewTime(moved) - grip;
      on.range(panned([start, start + to - from], 0, chart.scene.whole));
    };
    move(event);
    overview.onpointermove = move;
    overview.onpointerup = overview.onpointercancel = () => (overview.onpointermove = null);
  });

  function overviewTime({ clientX }) {
    const box = overview.getBoundingClientRect();
    return ((clientX - box.left) / box.width) * chart.scene.whole;
  }
}
