// The two lines on top: which step is shown, and how.

import { h, icon } from "./dom.js";
import { rough } from "./format.js";
import { exportAddress } from "./server.js";
import { createSlider } from "./slider.js";

// on: what people may want, by name: see app.js.
export function createToolbar(on) {
  const run = h("select", { id: "run", title: "Run", onchange: () => on.run(run.value) });
  const slider = createSlider(on.step);
  const step = h("output", { id: "step", for: "slider" });
  const back = button("previous", "Previous step (←)", on.previous);
  const next = button("next", "Next step (→)", on.next);
  const play = button("play", "Play through the steps (space)", on.play);
  const slowest = h(
    "button",
    { id: "slowest", title: "The slowest step of this run (X)", onclick: on.slowest },
    "Slowest step",
  );

  const otherRun = h("select", {
    id: "compare-run",
    title: "A run to compare with",
    onchange: () => on.compareRun(otherRun.value),
  });
  const otherStep = h("select", {
    id: "compare-step",
    title: "Its step",
    onchange: () => on.compareStep(Number(otherStep.value)),
  });
  const predicted = h("input", { type: "checkbox", id: "predicted", onchange: on.predicted });
  const fit = h("button", { id: "fit", title: "The whole step (F)", onclick: on.fit }, "Fit");
  const help = h("button", { id: "help", title: "Keys (?)", "aria-label": "Keys", onclick: on.help }, "?");
  const links = {
    chrome: h(
      "a",
      { id: "export-chrome", title: "Chrome trace: opens in ui.perfetto.dev", download: true },
      "Perfetto",
    ),
    svg: h("a", { id: "export-svg", title: "A picture of the whole step", download: true }, "SVG"),
    csv: h("a", { id: "export-csv", title: "A line an event", download: true }, "CSV"),
  };

  const element = h(
    "header",
    { class: "toolbar" },
    h(
      "div",
      { class: "line" },
      h("label", {}, h("span", {}, "Run"), run),
      h("span", { class: "group" }, back, play, next),
      slider.element,
      step,
      slowest,
    ),
    h(
      "div",
      { class: "line" },
      h("label", {}, h("span", {}, "Compare with"), otherRun),
      otherStep,
      h(
        "label",
        {
          class: "check",
          title: "The simulator, fed with this step's mean times, under what was measured (P)",
        },
        predicted,
        "Measured over predicted",
      ),
      h("span", { class: "stretch" }),
      h("span", { class: "group links" }, h("span", {}, "Export"), links.chrome, links.svg, links.csv),
      fit,
      help,
    ),
  );

  function show(state) {
    const steps = state.runs[state.run] ?? [];
    const at = steps.findIndex((one) => one.step === state.step);
    options(run, Object.keys(state.runs), state.run);
    slider.show(steps, at);
    step.replaceChildren(
      h("b", {}, `step ${state.step ?? "–"}`),
      h(
        "span",
        {},
        at < 0
          ? ""
          : [`${at + 1} of ${steps.length}`, steps[at].duration && rough(steps[at].duration)]
              .filter(Boolean)
              .join(" · "),
      ),
    );
    back.disabled = at <= 0;
    next.disabled = play.disabled = at < 0 || at === steps.length - 1;
    if (state.playing) play.disabled = false;
    play.replaceChildren(icon(state.playing ? "pause" : "play"));
    play.setAttribute("aria-pressed", state.playing);
    slowest.disabled = steps.length < 2;

    const other = state.compare;
    options(otherRun, ["", ...Object.keys(state.runs)], other?.run ?? "", (name) => name || "nothing");
    options(
      otherStep,
      (state.runs[other?.run] ?? []).map((one) => String(one.step)),
      String(other?.step ?? ""),
      (text) => `step ${text}`,
    );
    otherStep.hidden = !other;
    predicted.checked = state.predicted;
    predicted.disabled = Boolean(state.trace && !state.trace.hasPrediction);
    for (const [format, link] of Object.entries(links)) {
      if (state.trace) link.setAttribute("href", exportAddress(state.trace.run, state.trace.step, format));
      else link.removeAttribute("href");
    }
  }

  return { element, show };
}

function button(drawing, title, onclick) {
  return h("button", { id: drawing, class: "icon", title, "aria-label": title, onclick }, icon(drawing));
}

// Sets a list's entries, and leaves it alone where nothing changed: it may be open.
function options(select, values, chosen, write = (value) => value) {
  const key = values.join("\n");
  if (select.dataset.key !== key) {
    select.replaceChildren(...values.map((value) => h("option", { value }, write(value))));
    select.dataset.key = key;
  }
  select.value = chosen ?? "";
}
