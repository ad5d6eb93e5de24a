// Follows the run: asks for the page again and replaces the parts that differ. The reader's place, the
// zoom, hidden lines and what is unfolded stay.
"use strict";
(() => {
  const SECONDS = 3; // between two questions, while somebody looks
  const status = document.querySelector(".live");
  const parts = (page) => [...page.querySelectorAll("main > header, main > section")];
  const find = (id) => parts(document).find((part) => part.id === id);
  const shown = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  let tag = "";
  let changed = "";

  async function renew(page) {
    const below = parts(document).find((part) => part.getBoundingClientRect().bottom > 0);
    const place = () => find(below?.id ?? "").getBoundingClientRect().top;
    const before = place();
    let last = null;
    for (const part of parts(page)) {
      const old = find(part.id);
      const html = part.outerHTML;
      if (!old || shown.get(part.id) !== html) {
        shown.set(part.id, html);
        const unfolded = [...(old?.querySelectorAll("details") ?? [])].map((one) => one.open);
        part.querySelectorAll("details").forEach((one, i) => (one.open = Boolean(unfolded[i])));
        if (old) old.replaceWith(document.adoptNode(part));
        else last.after(document.adoptNode(part));
      }
      last = find(part.id);
    }
    document.title = page.title;
    document.dispatchEvent(new Event("renewed"));
    await null; // uPlot draws, and fills the legends, in a microtask
    scrollBy(0, place() - before);
  }

  async function ask() {
    if (document.hidden) return;
    let lost = "";
    try {
      const answer = await fetch("/", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        await renew(new DOMParser().parseFromString(await answer.text(), "text/html"));
        tag = answer.headers.get("ETag");
        changed = new Date().toLocaleTimeString();
      } else if (answer.status !== 304) lost = await answer.text();
    } catch (error) {
      lost = error.message;
    }
    status.textContent = lost ? `no news since ${changed}: ${lost}` : `live; last change ${changed}`;
    status.classList.toggle("lost", lost !== "");
  }

  document.documentElement.style.overflowAnchor = "none"; // `renew` does it
  document.addEventListener("visibilitychange", ask);
  (async () => {
    for (;;) {
      await ask();
      await new Promise((wait) => setTimeout(wait, 1000 * SECONDS));
    }
  })();
})();
