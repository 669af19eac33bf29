// What is shown, and what happens when that changes: the one owner of the page's state.

import { createChart } from "./chart.js";
import { h } from "./dom.js";
import { createNotice } from "./empty.js";
import { flowsOf } from "./flows.js";
import { createHelp } from "./help.js";
import { readLink, watchDarkMode, watchReloads, writeLink } from "./host.js";
import { followKeys } from "./keyboard.js";
import { createLegend } from "./legend.js";
import { followPointer } from "./pointer.js";
import { panned, within, zoomed } from "./range.js";
import { createSelection } from "./selection.js";
import { fetchStep, fetchSteps } from "./server.js";
import { createSummary } from "./summary.js";
import { createToolbar } from "./toolbar.js";
import { createTooltip, factsOf } from "./tooltip.js";
import { readTrace } from "./trace.js";

const STEP_SHOWN = 600; // milliseconds a step while playing
const LINK_AFTER = 250; // milliseconds of rest before the address follows

export function start(root) {
  const state = {
    runs: {},
    run: null,
    step: null,
    trace: null,
    compare: null, // {run, step, trace}
    range: null, // in view; null: the whole step
    selection: null,
    predicted: false,
    playing: false,
    loading: true,
    error: null,
    dark: false,
  };
  // What tests read; `place`, `measure` and `state` are for them, and for curious people.
  const view = (window.pipeline = { ready: null });
  let ticket = 0,
    timer = 0,
    linking = 0,
    pointer = null,
    sums = null;

  const chart = createChart(published);
  const toolbar = createToolbar({
    run: (run) => openStep(run, nearest(run, state.step)),
    step: (step) => openStep(state.run, step),
    go,
    play,
    slowest,
    predicted: togglePredicted,
    fit: () => setRange(null),
    compareRun: (run) => compareWith(run || null, nearest(run, state.compare?.step ?? state.step)),
    compareStep: (step) => compareWith(state.compare.run, step),
    help: () => help.toggle(),
  });
  const legend = createLegend(),
    summary = createSummary(),
    help = createHelp(),
    tooltip = createTooltip();
  const selection = createSelection({ zoom: zoomToSelection, clear: () => select(null) });
  const notice = createNotice(reload);
  const panel = h("aside", {}, selection.element, summary.element);
  root.append(
    toolbar.element,
    h("main", {}, h("div", { class: "timeline" }, legend.element, chart.element, notice.element), panel),
    help.element,
    tooltip.element,
  );

  followPointer(chart, { range: setRange, select, hover });
  followKeys({
    w: () => zoom(1.25),
    s: () => zoom(1 / 1.25),
    a: () => pan(-0.12),
    d: () => pan(0.12),
    "+": () => zoom(1.25),
    "-": () => zoom(1 / 1.25),
    f: () => setRange(null),
    z: zoomToSelection,
    arrowleft: () => go(-1),
    arrowright: () => go(+1),
    " ": play,
    x: slowest,
    p: togglePredicted,
    c: pin,
    escape: letGo,
    "?": () => help.toggle(),
  });
  state.dark = watchDarkMode((dark) => change({ dark }));
  watchReloads(reload);
  Object.assign(view, { place: chart.place, measure: chart.measure, state });
  open();

  // ---- opening steps

  async function open() {
    const link = readLink();
    const [from, to] = (link.range ?? "").split("-").map(Number);
    state.predicted = link.predicted === "1";
    show();
    await reload();
    if (link.range && to > from) setRange([from, to]);
    if (state.runs[link.compare]) compareWith(link.compare, nearest(link.compare, Number(link.with)));
  }

  // Reads the list of steps anew, and opens one if none is open; a broken one is tried again.
  async function reload() {
    try {
      state.runs = await fetchSteps();
    } catch (error) {
      return change({
        loading: false,
        error: { title: "The list of steps cannot be read", message: error.message },
      });
    }
    if (state.trace && !state.error) return show();
    const link = readLink();
    const run = state.run ?? (state.runs[link.run] ? link.run : Object.keys(state.runs)[0]);
    if (!state.runs[run]?.length) return change({ loading: false, error: null, run: null });
    const wanted = state.step ?? (link.step === undefined ? null : Number(link.step));
    await openStep(run, wanted === null ? state.runs[run].at(-1).step : nearest(run, wanted));
  }

  async function openStep(run, step) {
    const mine = ++ticket;
    change({ run, step, loading: true, error: null });
    let trace = null,
      error = null;
    try {
      trace = readTrace(run, await fetchStep(run, step));
    } catch (problem) {
      error = unreadable(run, step, problem);
    }
    if (mine !== ticket) return; // another step was asked for meanwhile
    pointer = null;
    hover(null, null, null);
    if (error) stop();
    change({
      trace,
      error,
      loading: false,
      range: trace && state.range && within(state.range, whole(trace)),
    });
  }

  async function compareWith(run, step) {
    if (!run) return change({ compare: null, loading: false });
    const compare = { run, step, trace: null };
    change({ compare, loading: true });
    try {
      compare.trace = readTrace(run, await fetchStep(run, step));
    } catch (problem) {
      if (state.compare === compare)
        change({ compare: null, loading: false, error: unreadable(run, step, problem) });
      return;
    }
    if (state.compare === compare) change({ loading: false });
  }

  function unreadable(run, step, { message }) {
    return { title: `Step ${step} of ${run} cannot be read`, message };
  }

  function pin() {
    if (state.trace) compareWith(state.run, state.step);
  }

  // The step of a run that is nearest to a number.
  function nearest(run, step) {
    const steps = (state.runs[run] ?? []).map((one) => one.step);
    return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
  }

  // ---- going through steps

  function neighbour(by) {
    const steps = state.runs[state.run] ?? [];
    return steps[steps.findIndex((one) => one.step === state.step) + by];
  }

  function go(by) {
    const next = neighbour(by);
    if (next && state.step !== null) openStep(state.run, next.step);
  }

  function slowest() {
    const steps = state.runs[state.run] ?? [];
    if (!steps.length) return;
    openStep(
      state.run,
      steps.reduce((worst, one) => ((one.duration ?? 0) > (worst.duration ?? 0) ? one : worst)).step,
    );
  }

  function play() {
    if (state.playing) return stop();
    change({ playing: true });
    const turn = async () => {
      const next = neighbour(1);
      if (!state.playing || !next) return stop();
      // A step that takes long to load is waited for, and then shown as long as the others.
      await openStep(state.run, next.step);
      if (state.playing) timer = setTimeout(turn, STEP_SHOWN);
    };
    timer = setTimeout(turn, STEP_SHOWN);
  }

  function stop() {
    clearTimeout(timer);
    if (state.playing) change({ playing: false });
  }

  // ---- moving in the step

  function whole(trace = state.trace) {
    return Math.max(trace.duration, state.compare?.trace?.duration ?? 0);
  }

  function range() {
    return state.range ?? [0, whole()];
  }

  function setRange(wanted) {
    if (!state.trace) return;
    const next = wanted && within(wanted, whole());
    state.range = next && next[1] - next[0] < whole() ? next : null;
    showChart();
    if (pointer) hover(chart.under(...pointer), ...pointer); // other bars are under it now
  }

  function zoom(factor) {
    if (!state.trace) return;
    const [from, to] = range();
    const around = pointer ? chart.timeAt(pointer[0]) : (from + to) / 2;
    setRange(zoomed([from, to], factor, around, whole()));
  }

  function pan(share) {
    if (!state.trace) return;
    const [from, to] = range();
    setRange(panned([from, to], share * (to - from), whole()));
  }

  function zoomToSelection() {
    if (state.selection) setRange(state.selection);
  }

  function select(selected) {
    state.selection = selected;
    sums = selection.show(state);
    showChart();
  }

  function togglePredicted() {
    change({ predicted: !state.predicted });
  }

  function letGo() {
    if (help.open) return help.close();
    if (state.playing) return stop();
    if (state.selection) return select(null);
    if (state.compare) return compareWith(null);
  }

  // ---- pointing

  function hover(under, x, y) {
    pointer = x === null ? null : [x, y];
    const at = { selection: state.selection, pointer: pointer && x };
    view.hover = null;
    if (under?.row) {
      const {
        row: { trace, member },
        event,
      } = under;
      const flows = flowsOf(trace, member, event);
      view.hover = { ...factsOf(trace, member, event), flows: flows.map(told) };
      chart.mark({ ...at, hovered: under, flows });
      const members = [member, ...flows.flatMap(({ from, to }) => [from.member, to.member])];
      tooltip.showEvent(
        trace,
        member,
        event,
        flows,
        state.dark,
        ...inPage(x, chart.extent(under.row.which, members)),
      );
    } else {
      chart.mark(at);
      if (under?.curve)
        tooltip.showCurve(tracesShown(), under.curve, chart.timeAt(x), ...inPage(x, { top: y, bottom: y }));
      else tooltip.hide();
    }
  }

  // What a flow is, without the objects that it joins.
  function told({ from, to, value, into }) {
    const end = ({ member, event, time }) => ({ rank: member.rank, replica: member.replica, event, time });
    return { from: end(from), to: end(to), value, into };
  }

  // From the chart's coordinates to the window's: x, a span to keep clear, and the frame to keep within.
  function inPage(x, { top, bottom }) {
    const box = chart.marks.getBoundingClientRect();
    const frame = { top: 0, right: box.right, bottom: window.innerHeight };
    return [box.left + x, { top: box.top + top, bottom: box.top + bottom }, frame];
  }

  // ---- showing

  function change(values) {
    Object.assign(state, values);
    show();
  }

  function tracesShown() {
    return [state.trace, state.compare?.trace].filter(Boolean);
  }

  function show() {
    document.documentElement.classList.toggle("dark", state.dark);
    toolbar.show(state);
    legend.show(state);
    summary.show(state);
    notice.show(state);
    sums = selection.show(state);
    panel.hidden = !state.trace;
    document.body.dataset.state = state.error
      ? "broken"
      : state.loading
        ? "loading"
        : state.run === null
          ? "empty"
          : "shown";
    showChart();
  }

  // Only the chart: range and selection change with every move of the mouse.
  function showChart() {
    delete document.body.dataset.ready;
    view.ready = null;
    chart.element.classList.toggle("blank", !state.trace);
    if (state.trace) {
      chart.show({
        traces: tracesShown(),
        range: range(),
        whole: whole(),
        predicted: state.predicted,
        dark: state.dark,
      });
      chart.mark({ selection: state.selection, pointer: pointer?.[0] ?? null });
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
      bars: {
        total: trace.actions,
        drawn: counts.drawn,
        events: counts.events,
        rectangles: counts.rectangles,
      },
      rows: scene.layout.rows.length,
      range: scene.range,
      whole: scene.whole,
      compare: compare?.trace && { run: compare.run, step: compare.step, bars: compare.trace.actions },
      selection: state.selection && { range: state.selection, ...sums },
      frameMs: frames.at(-1),
    });
    if (state.loading || state.error) return;
    view.ready = document.body.dataset.ready = `${trace.run}@${trace.step}`;
  }
}
