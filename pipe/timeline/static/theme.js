// The colours of everything on the canvas that is not a bar, for both modes. style.css has the page's own.

export const THEMES = {
  light: {
    paper: "#ffffff",
    track: "#f1f3f4",
    text: "#202124",
    quiet: "#5f6368",
    grid: "#dfe1e5",
    strong: "#9aa0a6",
    curve: "#0072b2",
    area: "rgb(0 114 178 / 16%)",
    other: "#b34e00",
    accent: "#1a73e8",
    accentArea: "rgb(26 115 232 / 12%)",
    shadow: "rgb(32 33 36 / 28%)",
    into: "#0b57d0",
    out: "#b3261e",
    outline: "#202124",
  },
  dark: {
    paper: "#292a2d",
    track: "#35363a",
    text: "#e8eaed",
    quiet: "#b0b4ba",
    grid: "#45474c",
    strong: "#80868b",
    curve: "#56b4e9",
    area: "rgb(86 180 233 / 18%)",
    other: "#f0a35e",
    accent: "#8ab4f8",
    accentArea: "rgb(138 180 248 / 16%)",
    shadow: "rgb(0 0 0 / 45%)",
    into: "#a8c7fa",
    out: "#f6aea9",
    outline: "#ffffff",
  },
};

export const ON_BAR = "#111111"; // what is written on a bar, in both modes

export const FONT = "Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif";
