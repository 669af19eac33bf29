// What the page knows of the TensorBoard around it: dark mode, the address, reloads. It is a guest in an iframe,
// and may be refused any of these: then it does without.

const PREFIX = "p.pipeline."; // TensorBoard's own form for what a plugin keeps in the address

// Calls back whenever TensorBoard turns dark or light. Returns which it is now.
export function watchDarkMode(changed) {
  try {
    const { body } = window.parent.document;
    const isDark = () => body.classList.contains("dark-mode");
    new MutationObserver(() => changed(isDark())).observe(body, {
      attributes: true,
      attributeFilter: ["class"],
    });
    return isDark();
  } catch {
    const wanted = window.matchMedia("(prefers-color-scheme: dark)");
    wanted.addEventListener("change", () => changed(wanted.matches));
    return wanted.matches;
  }
}

// {run, step, ...} as an address that was shared has them.
export function readLink() {
  try {
    const pairs = new URLSearchParams(window.parent.location.hash.slice(1));
    return Object.fromEntries(
      [...pairs]
        .filter(([key]) => key.startsWith(PREFIX))
        .map(([key, value]) => [key.slice(PREFIX.length), value]),
    );
  } catch {
    return {};
  }
}

// Puts the values into the address, beside what TensorBoard keeps there, without a new entry in the history.
export function writeLink(values) {
  try {
    const { location, history } = window.parent;
    if (!location.hash.startsWith("#pipeline")) return; // another tab is in front
    const others = location.hash
      .slice(1)
      .split("&")
      .filter((pair) => pair && !pair.startsWith(PREFIX));
    const ours = Object.entries(values)
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([key, value]) => `${PREFIX}${key}=${encodeURIComponent(value)}`);
    const hash = `#${[...others, ...ours].join("&")}`;
    // With its path: a bare hash would be taken relative to a base that the document may have.
    const address = location.pathname + location.search + hash;
    if (hash !== location.hash) history.replaceState(history.state, "", address);
  } catch {
    // The page works as well without a link to it.
  }
}

// Keys are for the page as soon as the pointer is on it, unless one is writing something in TensorBoard.
export function takeFocus() {
  try {
    const { activeElement } = window.parent.document;
    const isWriting = activeElement?.matches("input, textarea, select, [contenteditable]");
    if (!document.hasFocus() && !isWriting) window.focus();
  } catch {
    // A click does it.
  }
}

// Calls back when TensorBoard has read its logs again.
export function watchReloads(reloaded) {
  try {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (message.type === "experimental.DataReloaded") reloaded();
      if (!message.isReply) port1.postMessage(JSON.stringify({ ...message, payload: null, isReply: true }));
    };
    window.parent.postMessage("experimental.bootstrap", "*", [port2]);
  } catch {
    // The reload button of the browser remains.
  }
}
