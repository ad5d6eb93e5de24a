// A page from the disk may start no worker, and the theme searches in one. So a frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.started = new Promise((done) => (script.onload = done));
      this.inside.document.body.append(script);
    }
    async postMessage(data) {
      await this.started;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
