// Asking for news: once a second while somebody looks, less often while nobody answers.

const EVERY = 1000; // ms
const PATIENCE = 5000;
const LONGEST = 10000;

/**
 * Fetches `url` again and again. `news(data, age)` is called with each answer and its age in
 * seconds, `trouble(error)` with each failure. A hidden page asks nothing; shown again, it asks at once.
 */
export function poll(url, news, trouble) {
  let timer = null;
  let failures = 0;
  let asking = false;

  async function ask() {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(`it answers with ${answer.status}`);
      news(await answer.json(), Number(answer.headers.get("age")));
      failures = 0;
    } catch (error) {
      failures += 1;
      trouble(error);
    } finally {
      asking = false;
      if (!document.hidden) {
        timer = setTimeout(ask, failures ? Math.min(EVERY * 2 ** (failures - 1), LONGEST) : EVERY);
      }
    }
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) ask();
  });
  window.addEventListener("online", ask);
  ask();
}
