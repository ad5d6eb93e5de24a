// Follows the run: asks for the page again, and replaces the parts that differ. Where the reader is,
// zoom, hidden lines and what is unfolded stay.
"use strict";
(() => {
  const SECONDS = 3; // between two questions, where a reader looks
  const status = document.querySelector(".live");
  const parts = (page) => [...page.querySelectorAll("main > header, main > section")];
  const shown = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  const kept = (part) => [part.querySelectorAll("details"), part.querySelectorAll("pre, .strip figure")];
  let tag = "";
  let changed = new Date();

  function say(text, lost = false) {
    status.textContent = text;
    status.classList.toggle("lost", lost);
  }

  // Returns the pictures of a page by address, loaded: one that loads later would move what is below.
  async function pictures(page) {
    const found = new Map([...document.images].map((image) => [image.src, image]));
    const added = [...page.images].map((image) => image.src).filter((address) => !found.has(address));
    for (const address of added) found.set(address, Object.assign(new Image(), { src: address }));
    await Promise.allSettled(added.map((address) => found.get(address).decode()));
    return found;
  }

  function replace(old, part, loaded) {
    for (const image of part.querySelectorAll("img")) {
      const same = loaded.get(image.src);
      if (same && (old.contains(same) || !same.isConnected)) {
        same.alt = image.alt;
        image.replaceWith(same);
      }
    }
    const [unfolded, scrolled] = kept(old).map((found) => [...found].map((one) => one.open || one.scrollLeft));
    old.replaceWith(part);
    const [foldable, wide] = kept(part);
    foldable.forEach((one, i) => (one.open = Boolean(unfolded[i])));
    wide.forEach((one, i) => (one.scrollLeft = scrolled[i] ?? 0));
  }

  async function renew(page) {
    const loaded = await pictures(page);
    const before = parts(document);
    const anchor = before.find((part) => part.getBoundingClientRect().bottom > 0) ?? before[0];
    const top = anchor.getBoundingClientRect().top;
    let last = null;
    for (const part of parts(page)) {
      const html = part.outerHTML;
      const old = before.find((one) => one.id === part.id);
      if (old && shown.get(part.id) === html) {
        last = old;
        continue;
      }
      shown.set(part.id, html);
      const own = document.adoptNode(part);
      if (old) replace(old, own, loaded);
      else last.after(own);
      last = own;
    }
    document.title = page.title;
    document.dispatchEvent(new Event("renewed"));
    await null; // uPlot draws, and fills the legends, in a microtask
    const now = parts(document).find((part) => part.id === anchor.id);
    if (now) scrollBy(0, now.getBoundingClientRect().top - top);
  }

  async function ask() {
    if (document.hidden) return;
    try {
      const answer = await fetch("/", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        await renew(new DOMParser().parseFromString(await answer.text(), "text/html"));
        tag = answer.headers.get("ETag");
        changed = new Date();
      } else if (answer.status !== 304) throw new Error(await answer.text());
      say(`live; last change ${changed.toLocaleTimeString()}`);
    } catch (error) {
      say(`no news since ${changed.toLocaleTimeString()}: ${error.message}`, true);
    }
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
