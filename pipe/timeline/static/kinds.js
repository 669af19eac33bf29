// What kinds of event a trace has: their letters, names, lanes and colours.
//
// The colours are those of Okabe and Ito (2008), chosen to stay apart under every common colour blindness. A
// whole backward and the input-gradient part of a split one are orange and vermillion, which are kin. Bars are
// labelled in black, which has a contrast of 4.9 or more on each of them, in both modes.

export const COMPUTE = 0; // the bars of a row
export const WAIT = 1; // the thin lane under them: what holds the rank's own thread up
export const COLLECTIVE = 2; // another: what runs beside it
export const PREDICTED = 3; // the simulator's bars, under the measured ones
export const LANE_NAMES = ["compute", "wait", "collective", "predicted"];

const SKY = "#56b4e9",
  ORANGE = "#e69f00",
  VERMILLION = "#d55e00",
  GREEN = "#009e73";
const PURPLE = "#cc79a7",
  BLUE = "#0072b2",
  YELLOW = "#f0e442";

// In this order in the legend. `dark` is for the mode whose background would swallow the colour.
export const KINDS = [
  { letter: "F", name: "forward", lane: COMPUTE, color: SKY },
  { letter: "B", name: "backward", lane: COMPUTE, color: ORANGE },
  { letter: "I", name: "input gradient", lane: COMPUTE, color: VERMILLION },
  { letter: "W", name: "weight gradient", lane: COMPUTE, color: GREEN },
  { letter: "o", name: "optimizer", lane: COMPUTE, color: PURPLE },
  { letter: "r", name: "waiting to receive", lane: WAIT, color: "#8a8f98", dark: "#9aa0a6" },
  { letter: "s", name: "held up by a send", lane: WAIT, color: "#3c4043", dark: "#f1f3f4" },
  { letter: "u", name: "waiting for weights", lane: WAIT, color: "#b5a900", dark: YELLOW },
  { letter: "c", name: "agreement", lane: WAIT, color: "#c9a0ba", dark: "#8d5f7b" },
  { letter: "g", name: "gradient reduction", lane: COLLECTIVE, color: BLUE, dark: "#4ba3d8" },
];

export const CODES = Object.fromEntries(KINDS.map((kind, code) => [kind.letter, code]));
export const COMPUTES = "FBIW"; // what the simulator predicts, and what a bubble is the lack of

// The stages of a rank are told apart by the shade of their bars: the first one's is the full colour, each
// later one's is mixed with more white. White, in dark mode too: labels stay black.
export const SHADES = 4;
const LIGHTEST = 0.6;

export function fill(code, shade, dark) {
  const kind = KINDS[code];
  const color = (dark && kind.dark) || kind.color;
  return shade ? mixed(color, (LIGHTEST * shade) / (SHADES - 1)) : color;
}

// How far the shades of a rank with so many stages are apart: two stages get the ends of the range.
export function shadeOf(position, stages) {
  if (stages < 2) return 0;
  return Math.round((Math.min(position, SHADES - 1) * (SHADES - 1)) / (Math.min(stages, SHADES) - 1));
}

function mixed(color, white) {
  const channels = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgb(${channels.map((value) => Math.round(value + (255 - value) * white)).join(" ")})`;
}
