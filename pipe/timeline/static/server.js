// Asks the plugin's routes. Addresses are relative: the page's base is the plugin's data prefix, wherever
// TensorBoard is mounted.

// {run: [{step, wallTime, duration, bubble}]}, steps ascending; runs without steps are left out. What a step's scalars do
// not tell is null.
export async function fetchSteps() {
  const { runs } = await ask("./steps");
  const rows = ({ steps, wall_time: wallTime, duration, bubble }) =>
    steps.map((step, at) => ({ step, wallTime: wallTime[at], duration: duration[at], bubble: bubble[at] }));
  return Object.fromEntries(runs.filter(({ steps }) => steps.length).map((one) => [one.run, rows(one)]));
}

const KEPT = 6; // answers: one goes back and forth between neighbours, and compares

const kept = new Map();

// The answer for one step; the last few are kept. Raises an Error with the server's message.
export async function fetchStep(run, step) {
  const key = address("step", { run, step });
  if (!kept.has(key)) kept.set(key, ask(key));
  const answer = kept.get(key);
  kept.delete(key); // and back in, as the newest
  kept.set(key, answer);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  try {
    return await answer;
  } catch (error) {
    kept.delete(key); // so that a reload asks anew
    throw error;
  }
}

export function exportAddress(run, step, format) {
  return address("export", { run, step, format });
}

function address(route, query) {
  return `./${route}?${new URLSearchParams(query)}`;
}

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path);
  } catch (error) {
    throw new Error(`TensorBoard does not answer (${error.message}). Is it still running?`, { cause: error });
  }
  if (answer.ok) return answer.json();
  throw new Error(
    messageOf(await answer.text()) || `TensorBoard answered ${answer.status} ${answer.statusText}`,
  );
}

// Errors come as text, or as {"error": text}.
function messageOf(body) {
  try {
    return JSON.parse(body).error ?? body;
  } catch {
    return body;
  }
}
