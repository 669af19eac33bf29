// The panel beside the timeline: how long the step took, where the time went that nobody computed in, and what
// to do about it. All of it is computed by the server; here it is only set.

import { h } from "./dom.js";
import { count, percent, rough, signed } from "./format.js";

// The causes of idle time, in the order in which they come up in a step.
const CAUSES = [
  ["warm_up", "warm-up", "before the rank's first computation"],
  ["activation", "activ.", "waiting for another stage to make an activation"],
  ["gradient", "grad.", "waiting for another stage to make a gradient"],
  [
    "communication",
    "comm.",
    "waiting for what was already made to arrive, for sends, weights and reductions",
  ],
  ["overhead", "engine", "agreements before and after the schedule, and between events: the engine's own time"],
  ["drain", "drain", "after the rank's last computation, until the last rank's"],
  ["optimizer", "optim.", "after the schedule: clipping, optimizer step"],
];

const UNEVEN = 1.02; // times the mean: from here on a slowest stage is marked

export function createSummary() {
  const element = h("section", { class: "summary" });
  return {
    element,
    show({ trace, compare }) {
      if (!trace) return element.replaceChildren();
      const { summary, header } = trace;
      const other = compare?.trace?.summary;
      element.replaceChildren(
        h(
          "p",
          { class: "plan" },
          h("b", {}, header.schedule),
          ` · ${count(header.ranks, "rank")} × ${count(header.microbatches, "microbatch").replace("hs", "hes")}`,
          header.replicas > 1 ? ` × ${header.replicas} replicas` : "",
        ),
        headline(summary, other),
        ...advice(summary),
        bubble(summary, header),
        stages(summary),
        footer(header, summary),
      );
    },
  };
}

function headline(summary, other) {
  const figure = (name, title, value, write, change) =>
    h(
      "div",
      { class: "figure", title },
      h("span", {}, name),
      h("b", {}, write(value(summary))),
      other && h("em", { title: "In the step compared with, and how much more or less" }, change(value(summary), value(other))),
    );
  const longer = (here, there) => `${rough(there)}, ${signed(there / here - 1, (share) => percent(share))}`;
  const points = (here, there) =>
    `${percent(there)}, ${signed(100 * (there - here), (value) => value.toFixed(1))} points`;
  return h(
    "div",
    { class: "figures" },
    figure(
      "step",
      "From the first member's begin to the last one's end",
      (one) => one.duration,
      rough,
      longer,
    ),
    figure(
      "without bubble",
      "What the step would take if no rank waited inside the schedule",
      (one) => one.ideal,
      rough,
      longer,
    ),
    figure(
      "bubble",
      "The share of the schedule in which ranks compute nothing",
      (one) => one.bubble,
      percent,
      points,
    ),
    summary.predicted &&
      figure(
        "predicted",
        "The simulator, fed with this step's mean times",
        (one) => one.predicted ?? NaN,
        rough,
        longer,
      ),
  );
}

function advice({ advice: sentences, slowest }) {
  if (!sentences.length) return [];
  return [
    h("ul", { class: "advice", "data-slowest": slowest?.stage }, ...sentences.map((one) => h("li", {}, one))),
  ];
}

function bubble(summary, header) {
  const { members, duration } = summary;
  const shown = CAUSES.filter(([key]) => members.some((member) => member.causes[key] / duration >= 0.0005));
  const most = Math.max(...members.map((member) => member.idle), 1);
  const waits = members.some((member) => member.waits.length);
  const cell = (time, title, scale, strong) =>
    h(
      "td",
      { title: `${title}: ${rough(time)}`, class: strong ? "all" : null },
      time / duration >= 0.0005 ? percent(time / duration).slice(0, -2) : h("span", { class: "nil" }, "–"),
      h("i", { style: `width: ${(100 * time) / scale}%` }),
    );
  const line = (member) => {
    const waited = member.waits[0];
    return h(
      "tr",
      { "data-member": member.member },
      h("th", {}, header.replicas > 1 ? `${member.rank}, ${member.replica}` : member.rank),
      cell(member.idle, "all idle time of the step", most, true),
      ...shown.map(([key, , title]) => cell(member.causes[key], title + byStage(member, key), most)),
      waits &&
        h(
          "td",
          { class: "word", title: byStage(member, "activation") + byStage(member, "gradient") },
          waited && waited.time / duration >= 0.0005
            ? waited.stage < 0
              ? "?"
              : `stage ${waited.stage}`
            : h("span", { class: "nil" }, "–"),
        ),
    );
  };
  const mean = (time) => members.reduce((sum, member) => sum + time(member), 0) / members.length;
  const foot =
    members.length > 1 &&
    h(
      "tfoot",
      {},
      h(
        "tr",
        {},
        h("th", {}, "mean"),
        cell(
          mean((member) => member.idle),
          "idle time of the step, mean of all ranks",
          most,
          true,
        ),
        ...shown.map(([key, , title]) =>
          cell(
            mean((member) => member.causes[key]),
            `${title}, mean of all ranks`,
            most,
          ),
        ),
        waits && h("td"),
      ),
    );
  return h(
    "div",
    { class: "part" },
    h("h2", {}, "Idle time by cause", h("span", { class: "unit" }, "% of the step")),
    h(
      "table",
      { class: "causes" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { title: header.replicas > 1 ? "rank, replica" : null }, "rank"),
          h("th", { title: "all idle time of the step" }, "all"),
          ...shown.map(([, name, title]) => h("th", { title }, name)),
          waits &&
            h("th", { class: "word", title: "The stage that the rank waited for longest" }, "waits for"),
        ),
      ),
      h("tbody", {}, ...members.map(line)),
      foot,
    ),
  );
}

// "; 1.2 ms for stage 3, 0.4 ms for stage 2": of a cause that is a wait for another stage.
function byStage({ waits }, cause) {
  const found = waits.filter(({ value }) => value === cause);
  return found
    .map(({ stage, time }) => `; ${rough(time)} for ${stage < 0 ? "an unknown stage" : `stage ${stage}`}`)
    .join("");
}

function stages({ stages: all, slowest }) {
  if (all.length < 2) return null;
  const longest = Math.max(...all.map((one) => one.time), 1e-9);
  const line = (one) =>
    h(
      "tr",
      {
        class: one.stage === slowest?.stage && slowest.ratio >= UNEVEN ? "slowest" : null,
        "data-stage": one.stage,
      },
      h("th", {}, one.stage),
      h("td", {}, one.rank),
      h("td", {}, one.layers.join("-")),
      h("td", {}, rough(one.time)),
      h(
        "td",
        { class: "ratio" },
        `${one.ratio.toFixed(2)} ×`,
        h("i", { style: `width: ${(100 * one.time) / longest}%` }),
      ),
    );
  return h(
    "div",
    { class: "part" },
    h("h2", {}, "Stages", h("span", { class: "unit" }, "time of a microbatch, over the mean")),
    h(
      "table",
      { class: "stages" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "stage"),
          h("th", {}, "rank"),
          h("th", { title: "As in the device map: from the first to before the last" }, "layers"),
          h("th", {}, "time"),
          h("th", {}, "× mean"),
        ),
      ),
      h("tbody", {}, ...all.map(line)),
    ),
  );
}

function footer(header, summary) {
  const scalars = Object.entries(header.scalars)
    .filter(([, value]) => value !== null)
    .map(([name, value]) => h("span", {}, `${name} `, h("b", {}, Number(value.toPrecision(5)))));
  const clock =
    summary.clock_error > 0
      ? `Clocks of the ranks are aligned to within ${rough(summary.clock_error)}.`
      : "All ranks share one clock.";
  return h(
    "footer",
    {},
    scalars.length ? h("p", { class: "scalars" }, ...scalars) : null,
    h("p", {}, h("code", {}, header.options)),
    h("p", {}, `${clock} Times by ${header.clock.kind === "cuda" ? "CUDA events" : "the CPU's clock"}.`),
  );
}
