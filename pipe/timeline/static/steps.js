// Opens steps: from the server's list, one after the other, and beside each other.

import { fetchStep, fetchSteps } from "./server.js";
import { readTrace } from "./trace.js";

const SHOWN = 600; // milliseconds a step while playing

// Changes `runs`, `run`, `step`, `trace`, `compare`, `opening`, `playing` and `error` of the page's state.
export function createSteps(state, change) {
  let ticket = 0;
  let timer = 0;

  // Reads the list of steps anew, and opens one if none is open: the one that a link wants, {run, step}, or
  // the latest of all. A broken one is tried again. A page on the last step of a run follows the run.
  async function reload(wanted = {}) {
    const following = state.step !== null && state.step === stepsOf().at(-1)?.step;
    try {
      state.runs = await fetchSteps();
    } catch (error) {
      return change({
        opening: false,
        error: { title: "The list of steps cannot be read", message: error.message },
      });
    }
    if (state.trace && !state.error) {
      const last = stepsOf().at(-1)?.step ?? state.step;
      if (following && last !== state.step) await open(state.run, last);
      else change({});
      return;
    }
    const run = state.run ?? wanted.run ?? latest();
    if (run === undefined) return change({ opening: false, error: null, run: null });
    if (!state.runs[run]) {
      const message = `Traces are there of: ${Object.keys(state.runs).join(", ") || "no run yet"}`;
      return change({ opening: false, error: { title: `There is no run ${run}`, message } });
    }
    const step = state.step ?? wanted.step;
    await open(run, step === undefined ? state.runs[run].at(-1).step : nearest(run, Number(step)));
  }

  async function open(run, step) {
    const mine = ++ticket;
    change({ run, step, opening: true, error: null });
    const [trace, error] = await read(run, step);
    if (mine !== ticket) return; // another step was asked for meanwhile
    if (error) stop();
    change({ trace, error, opening: false });
  }

  // Puts a step under the one that is open; with null, none.
  async function compareWith(run, step) {
    if (!run) return change({ compare: null });
    const compare = { run, step, trace: null };
    change({ compare });
    const [trace, error] = await read(run, step);
    if (state.compare !== compare) return;
    compare.trace = trace;
    change(error ? { compare: null, error } : {});
  }

  async function read(run, step) {
    try {
      return [readTrace(run, await fetchStep(run, step)), null];
    } catch ({ message }) {
      return [null, { title: `Step ${step} of ${run} cannot be read`, message }];
    }
  }

  function latest() {
    const written = (run) => stepsOf(run).at(-1).wallTime;
    const runs = Object.keys(state.runs);
    return runs.length ? runs.reduce((one, other) => (written(other) > written(one) ? other : one)) : undefined;
  }

  function stepsOf(run = state.run) {
    return state.runs[run] ?? [];
  }

  // The step of a run that is nearest to a number.
  function nearest(run, step) {
    const numbers = stepsOf(run).map((one) => one.step);
    return numbers.reduce(
      (best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best),
      numbers[0],
    );
  }

  function neighbour(by) {
    return stepsOf()[stepsOf().findIndex((one) => one.step === state.step) + by];
  }

  function go(by) {
    const next = neighbour(by);
    if (next && state.step !== null) open(state.run, next.step);
  }

  function slowest() {
    const longer = (one, other) => ((other.duration ?? 0) > (one.duration ?? 0) ? other : one);
    if (stepsOf().length) open(state.run, stepsOf().reduce(longer).step);
  }

  function play() {
    if (state.playing) return stop();
    change({ playing: true });
    timer = setTimeout(turn, SHOWN);
  }

  async function turn() {
    const next = neighbour(1);
    if (!state.playing || !next) return stop();
    // A step that takes long to load is waited for, and then shown as long as the others.
    await open(state.run, next.step);
    if (state.playing) timer = setTimeout(turn, SHOWN);
  }

  function stop() {
    clearTimeout(timer);
    if (state.playing) change({ playing: false });
  }

  return { reload, open, compareWith, nearest, go, slowest, play, stop };
}
