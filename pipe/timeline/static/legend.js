// What the colours mean: the kinds of event that the step has.

import { h } from "./dom.js";
import { WAIT, fill } from "./kinds.js";
import { CODES } from "./kinds.js";

export function createLegend() {
  const element = h("div", { class: "legend" });
  return {
    element,
    show({ trace, dark, predicted }) {
      if (!trace) return element.replaceChildren();
      const virtual = trace.members.some((member) => member.stages.length > 1);
      const entries = trace.kinds.map(({ letter, name, lane }) =>
        entry(fill(CODES[letter], 0, dark), name, lane >= WAIT),
      );
      if (virtual) entries.push(shades(dark));
      if (predicted && trace.hasPrediction)
        entries.push(h("span", { class: "note" }, "upper bars measured, lower ones predicted"));
      element.replaceChildren(...entries);
    },
  };
}

function entry(color, name, thin) {
  return h(
    "span",
    {},
    h("i", { class: thin ? "swatch thin" : "swatch", style: `background: ${color}` }),
    name,
  );
}

function shades(dark) {
  const steps = [0, 1, 2, 3].map((shade) =>
    h("i", { class: "swatch shade", style: `background: ${fill(0, shade, dark)}` }),
  );
  return h("span", {}, steps, "a rank's first to last stage");
}
