// What ranks did in a selected range of time.

import { h } from "./dom.js";
import { exact, percent, rough } from "./format.js";
import { CODES, COMPUTES, KINDS, fill } from "./kinds.js";
import { totals } from "./trace.js";

export function createSelection(on) {
  const element = h("section", { class: "selection", hidden: true });
  return {
    element,
    // Returns the totals, of which tests read the numbers.
    show({ trace, selection, dark }) {
      element.hidden = !selection || !trace;
      if (element.hidden) return null;
      const sums = totals(trace, selection);
      element.replaceChildren(...contents(trace, selection, sums, dark, on));
      return sums;
    },
  };
}

function contents(trace, [from, to], sums, dark, on) {
  const present = KINDS.filter(({ letter }) => sums.time[letter]);
  const row = (name, time, events, color, special) =>
    h(
      "tr",
      { class: special },
      h("th", {}, color && h("i", { class: "swatch", style: `background: ${color}` }), name),
      h("td", {}, events ?? ""),
      h("td", {}, rough(time)),
      h("td", {}, sums.all > 0 ? percent(time / sums.all) : ""),
    );
  const line = ({ letter, name }) =>
    row(name, sums.time[letter], sums.events[letter], fill(CODES[letter], 0, dark));
  const computes = present.filter(({ letter }) => COMPUTES.includes(letter));
  const others = present.filter(({ letter }) => !COMPUTES.includes(letter));
  return [
    h(
      "h2",
      {},
      "Selected range",
      h("span", { class: "stretch" }),
      h("button", { onclick: on.zoomToSelection, title: "Z" }, "Zoom"),
      h("button", { onclick: () => on.select(null), title: "Esc" }, "Clear"),
    ),
    h(
      "p",
      {},
      `${exact(from)} to ${exact(to)}: ${exact(to - from)}, over ${trace.members.length} ranks`.replace(
        "1 ranks",
        "1 rank",
      ),
    ),
    h(
      "table",
      { class: "sums" },
      h("tr", {}, ...["", "events", "time", "share"].map((name) => h("th", {}, name))),
      ...computes.map(line),
      row("computing nothing", sums.idle, null, null, "total"),
      ...others.map(line),
    ),
  ];
}
