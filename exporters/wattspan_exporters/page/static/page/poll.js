// Polling: once a second while the page is visible, with increasing delays after failures.

const INTERVAL = 1000; // ms
const TIMEOUT = 5000;
const LONGEST_DELAY = 10000;

/** Polls `url` while the page is visible: `received(data, age in seconds)`, or `failed(error)`. */
export function poll(url, received, failed) {
  let timer = null;
  let failures = 0;
  let pending = false;

  async function request() {
    if (pending) return;
    pending = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      received(await answer.json(), Number(answer.headers.get("age")));
      failures = 0;
    } catch (error) {
      failures += 1;
      failed(error);
    } finally {
      pending = false;
      const delay = Math.min(INTERVAL * 2 ** Math.max(0, failures - 1), LONGEST_DELAY);
      if (!document.hidden) timer = setTimeout(request, delay);
    }
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) request();
  });
  window.addEventListener("online", request);
  request();
}
