// The slider of steps, over a picture of how long each of them took: the slow ones can be seen, and picked.

import { h } from "./dom.js";

const HEIGHT = 22;

export function createSlider(chosen) {
  const input = h("input", { type: "range", id: "slider", min: "0", "aria-label": "Step" });
  const canvas = h("canvas", { "aria-hidden": "true" });
  const element = h("div", { class: "slider" }, canvas, input);
  let steps = [];
  let at = -1;
  input.addEventListener("input", () => chosen(steps[Number(input.value)].step));
  new ResizeObserver(draw).observe(element);

  function draw() {
    const width = element.clientWidth,
      ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = HEIGHT * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(element);
    const longest = Math.max(...steps.map((one) => one.duration ?? 0), 1);
    // The thumb's middle runs from half of its width to the same before the end.
    const thumb = 14,
      reach = width - thumb;
    const bar = Math.max(1, Math.min(10, (reach / Math.max(steps.length - 1, 1)) * 0.7));
    steps.forEach(({ duration }, number) => {
      if (!duration) return;
      const height = Math.max(1, (duration / longest) * HEIGHT);
      const x = thumb / 2 + (steps.length > 1 ? (number / (steps.length - 1)) * reach : 0);
      context.fillStyle = style.getPropertyValue(number === at ? "--accent" : "--bar");
      context.fillRect(x - bar / 2, HEIGHT - height, bar, height);
    });
  }

  return {
    element,
    show(newSteps, newAt) {
      steps = newSteps;
      at = newAt;
      input.max = Math.max(steps.length - 1, 0);
      input.value = Math.max(at, 0);
      input.disabled = steps.length < 2;
      input.setAttribute("aria-valuetext", at < 0 ? "" : `step ${steps[at].step}`);
      draw();
    },
  };
}
