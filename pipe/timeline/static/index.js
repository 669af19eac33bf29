// What TensorBoard imports and calls: sets the page up in its iframe, and says so if that fails.

export async function render() {
  try {
    await addStyle();
    const { start } = await import("./app.js");
    document.title = "Pipeline";
    document.documentElement.lang = "en";
    start(document.body);
  } catch (error) {
    const message = document.createElement("pre");
    message.textContent = `The Pipeline page did not start: ${error.stack ?? error}`;
    document.body.append(message);
    document.body.dataset.state = "broken";
  }
}

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./style.css", import.meta.url).href;
  return new Promise((resolve, reject) => {
    link.onload = resolve;
    link.onerror = () => reject(new Error("style.css did not load"));
    document.head.append(link);
  });
}
