// What the keys do. Perfetto's WASD, and a few more.

export const KEYS = [
  ["W / S", "zoom in and out around the pointer (the wheel too)"],
  ["A / D", "move left and right (shift + drag, or drag the strip on top)"],
  ["F", "fit the whole step (or double click)"],
  ["Z", "zoom to the selected range"],
  ["drag", "select a range: what ranks did in it"],
  ["← / →", "previous and next step"],
  ["space", "play through the steps"],
  ["X", "the slowest step"],
  ["P", "measured over predicted"],
  ["C", "pin this step below, to compare others with it"],
  ["esc", "let go of selection, comparison or this help"],
  ["?", "this help"],
];

// on: what people may want, by name: see app.js.
export function followKeys(on) {
  const actions = {
    w: () => on.zoom(1.25),
    s: () => on.zoom(1 / 1.25),
    a: () => on.pan(-0.12),
    d: () => on.pan(0.12),
    f: on.fit,
    z: on.zoomToSelection,
    arrowleft: on.previous,
    arrowright: on.next,
    " ": on.play,
    x: on.slowest,
    p: on.predicted,
    c: on.pin,
    escape: on.letGo,
    "?": on.help,
  };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { target } = event;
    const key = event.key.toLowerCase();
    // A list or a slider has its own use for letters and arrows; a focused button for the space bar.
    if (target.matches?.("select, input[type=text], input[type=number]")) return;
    if (target.matches?.("input[type=range]") && key.startsWith("arrow")) return;
    if (target.matches?.("button, input, a") && [" ", "enter"].includes(key)) return;
    if (!actions[key]) return;
    event.preventDefault();
    actions[key]();
  });
}
