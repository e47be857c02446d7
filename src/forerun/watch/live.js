// Replaces the content of the page when the run has news. The scroll position and opened details stay.
(() => {
  "use strict";
  const EVERY_MS = 2000;
  const own = [...document.scripts];
  const charts = own[0].textContent;
  const state = document.createElement("p");
  state.id = "live";
  state.style.cssText = "position:fixed;right:1rem;bottom:.5rem;margin:0;padding:.1rem .6rem;border-radius:.6rem;" +
    "font-size:.8rem;background:#1f6f43;color:#fff";
  let version = "";
  const tell = (text, good) => { state.textContent = text; state.style.background = good ? "#1f6f43" : "#a33"; };
  const drawCharts = () => {
    const script = document.createElement("script");
    script.textContent = charts;
    document.body.append(script);
    script.remove();
  };
  const opened = (root) => [...root.querySelectorAll("details")].map((one) => one.querySelector("summary").textContent);
  const update = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    const known = new Set(opened(document));
    const open = new Set([...document.querySelectorAll("details[open]")].map((one) =>
      one.querySelector("summary").textContent));
    for (const one of next.querySelectorAll("details")) {
      const name = one.querySelector("summary").textContent;
      if (known.has(name)) one.open = open.has(name);
    }
    next.querySelectorAll("script").forEach((script) => script.remove());
    const [x, y] = [scrollX, scrollY];
    document.title = next.title;
    document.body.replaceChildren(...next.body.childNodes, state);
    drawCharts();
    scrollTo(x, y);
  };
  const poll = async () => {
    try {
      const answer = await fetch(`content?version=${encodeURIComponent(version)}`, {cache: "no-store"});
      if (answer.status === 200) {
        const text = await answer.text();
        version = answer.headers.get("X-Version");
        if (!document.querySelector("figure.lines .cross:not([hidden])")) update(text);
        else version = "";  // a pointer reads a chart: the next poll replaces it
      }
      tell(answer.ok ? `live, read at ${new Date().toLocaleTimeString()}` : `error ${answer.status}`, answer.ok);
    } catch {
      tell("forerun watch has ended; this is the last state", false);
    }
    setTimeout(poll, EVERY_MS);
  };
  document.body.append(state);
  poll();
})();
