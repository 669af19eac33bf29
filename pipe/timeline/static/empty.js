// What stands in the timeline's place while there is none: loading, nothing there yet, or broken.

import { h } from "./dom.js";

export function createNotice(on) {
  const element = h("div", { class: "notice", role: "status" });
  return {
    element,
    show(state) {
      const content = contentOf(state, on);
      element.hidden = !content;
      // While a next step loads, the one before it stays to be seen.
      element.classList.toggle("veil", Boolean(state.trace && !state.error));
      if (content) element.replaceChildren(...content);
    },
  };
}

function contentOf(state, on) {
  if (state.error) {
    return [
      h("h2", {}, state.error.title),
      h("pre", {}, state.error.message),
      h("button", { onclick: on.reload }, "Try again"),
    ];
  }
  if (state.opening || (state.compare && !state.compare.trace))
    return [h("p", { class: "loading" }, "Loading …")];
  if (state.run === null) {
    return [
      h("h2", {}, "No traced steps yet"),
      h("p", {}, "A step's timeline is written when the pipeline's options name a directory:"),
      h("pre", {}, 'Pipeline(model, "chunks=8 device_map=0:0-4,1:4-8 tensorboard=runs", ...)'),
      h(
        "p",
        {},
        "Then look at that directory: ",
        h("code", {}, "tensorboard --logdir runs"),
        ". To trace each 10th step only, add ",
        h("code", {}, "trace_every=10"),
        ".",
      ),
      h("button", { onclick: on.reload }, "Look again"),
    ];
  }
  return null;
}
