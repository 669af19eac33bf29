// The keys, on a sheet over the page.

import { h } from "./dom.js";
import { KEYS } from "./keyboard.js";

export function createHelp() {
  const close = h("button", { onclick: () => element.close() }, "Close");
  const element = h(
    "dialog",
    { class: "help" },
    h("h2", {}, "Keys and mouse"),
    h(
      "table",
      {},
      ...KEYS.map(([key, what]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, what))),
    ),
    h(
      "p",
      {},
      "Point at a bar for its times, and for arrows: blue ones from whom it was fed, red ones to whom it feeds. ",
      "Colours are those of Okabe and Ito, which stay apart under every common colour blindness; the stages of a rank are shades of them.",
    ),
    close,
  );
  return {
    element,
    toggle: () => (element.open ? element.close() : element.showModal()),
    close: () => element.close(),
    get open() {
      return element.open;
    },
  };
}
