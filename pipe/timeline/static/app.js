// What is shown, and what happens when that changes: the one owner of the page's state.

import { createChart } from "./chart.js";
import { h } from "./dom.js";
import { createNotice } from "./empty.js";
import { createHelp } from "./help.js";
import { readLink, takeFocus, watchDarkMode, watchReloads, writeLink } from "./host.js";
import { followKeys } from "./keyboard.js";
import { createLegend } from "./legend.js";
import { createMoving, rangeOf, wholeOf } from "./moving.js";
import { createPointing } from "./pointing.js";
import { followPointer } from "./pointer.js";
import { createSelection } from "./selection.js";
import { createSteps } from "./steps.js";
import { createSummary } from "./summary.js";
import { createToolbar } from "./toolbar.js";

const LINK_AFTER = 250; // milliseconds of rest before the address follows

export function start(root) {
  const state = {
    runs: {}, // by name: [{step, duration, bubble}]
    run: null,
    step: null,
    trace: null,
    compare: null, // {run, step, trace}: the step under it
    range: null, // in view; null: the whole step
    selection: null,
    predicted: false,
    playing: false,
    opening: true,
    error: null, // {title, message}
    dark: false,
  };
  // What tests read; `place`, `measure` and `state` are for them, and for curious people.
  const view = (window.pipeline = { ready: null, hover: null, state });
  let linking = 0;
  let sums = null;

  const chart = createChart(published);
  const steps = createSteps(state, change);
  const pointing = createPointing(chart, state, (facts) => (view.hover = facts));
  const moving = createMoving(state, showChart, pointing.time);
  const intents = {
    run: (run) => steps.open(run, steps.nearest(run, state.step)),
    step: (step) => steps.open(state.run, step),
    compareRun: (run) =>
      steps.compareWith(run || null, steps.nearest(run, state.compare?.step ?? state.step)),
    compareStep: (step) => steps.compareWith(state.compare.run, step),
    previous: () => steps.go(-1),
    next: () => steps.go(+1),
    play: steps.play,
    slowest: steps.slowest,
    pin: () => state.trace && steps.compareWith(state.run, state.step),
    reload: () => steps.reload(),
    predicted: () => change({ predicted: !state.predicted }),
    fit: () => moving.set(null),
    range: moving.set,
    zoom: moving.zoom,
    pan: moving.pan,
    zoomToSelection: moving.toSelection,
    select,
    hover: pointing.at,
    help: () => help.toggle(),
    letGo,
  };
  const toolbar = createToolbar(intents);
  const legend = createLegend();
  const selection = createSelection(intents);
  const summary = createSummary();
  const notice = createNotice(intents);
  const help = createHelp();
  const panel = h("aside", {}, selection.element, summary.element);
  const timeline = h("div", { class: "timeline" }, legend.element, chart.element, notice.element);
  root.append(toolbar.element, h("main", {}, timeline, panel), help.element, pointing.element);
  Object.assign(view, { place: chart.place, measure: chart.measure });

  followPointer(chart, intents);
  followKeys(intents);
  document.addEventListener("pointerenter", takeFocus);
  state.dark = watchDarkMode((dark) => change({ dark }));
  watchReloads(intents.reload);
  openLink(readLink());

  async function openLink(link) {
    const [from, to] = (link.range ?? "").split("-").map(Number);
    change({ predicted: link.predicted === "1" });
    await steps.reload(link);
    if (to > from) moving.set([from, to]);
    if (state.runs[link.compare]) {
      await steps.compareWith(link.compare, steps.nearest(link.compare, Number(link.with ?? state.step)));
      if (to > from) moving.set([from, to]); // the axis may be longer now
    }
  }

  function select(selected) {
    state.selection = selected;
    sums = selection.show(state);
    showChart();
  }

  // Esc: lets go of one thing at a time.
  function letGo() {
    if (help.open) return help.close();
    if (state.playing) return steps.stop();
    if (state.selection) return select(null);
    if (state.compare) return steps.compareWith(null);
  }

  function change(values) {
    const before = state.trace;
    Object.assign(state, values);
    document.documentElement.classList.toggle("dark", state.dark);
    document.body.dataset.state = condition();
    for (const part of [toolbar, legend, summary, notice]) part.show(state);
    sums = selection.show(state);
    panel.hidden = !state.trace;
    if (state.trace !== before && state.range && state.trace) state.range = rangeOf(state);
    showChart();
  }

  function condition() {
    if (state.error) return "broken";
    if (isLoading()) return "loading";
    return state.run === null ? "empty" : "shown";
  }

  function isLoading() {
    return state.opening || Boolean(state.compare && !state.compare.trace);
  }

  // The chart alone: range and selection change with every move of the mouse.
  function showChart() {
    delete document.body.dataset.ready;
    view.ready = null;
    chart.element.classList.toggle("blank", !state.trace);
    if (state.trace) {
      const traces = [state.trace, state.compare?.trace].filter(Boolean);
      chart.show({ ...state, traces, range: rangeOf(state), whole: wholeOf(state) });
      pointing.again();
    }
    clearTimeout(linking);
    linking = setTimeout(link, LINK_AFTER);
  }

  function link() {
    if (!state.trace) return;
    writeLink({
      run: state.run,
      step: state.step,
      range: state.range && state.range.map((time) => time.toFixed(1)).join("-"),
      compare: state.compare?.run,
      with: state.compare?.step,
      predicted: state.predicted ? "1" : null,
    });
  }

  // After each frame: what it showed.
  function published({ frames, scene }, counts) {
    const { trace, compare } = state;
    if (!trace || scene.traces[0] !== trace) return;
    Object.assign(view, {
      run: trace.run,
      step: trace.step,
      dark: state.dark,
      predicted: state.predicted && trace.hasPrediction,
      bars: { total: trace.actions, ...counts },
      rows: scene.layout.rows.length,
      range: scene.range,
      whole: scene.whole,
      compare: compare?.trace && { run: compare.run, step: compare.step, bars: compare.trace.actions },
      selection: state.selection && { range: state.selection, ...sums },
      frameMs: frames.at(-1),
    });
    if (condition() === "shown") view.ready = document.body.dataset.ready = `${trace.run}@${trace.step}`;
  }
}
