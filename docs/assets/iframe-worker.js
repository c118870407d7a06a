// Search from a folder: browsers start no worker from file: addresses. This one runs the script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = (address) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        inside.document.body.appendChild(script);
      });
      inside.importScripts = (...urls) => Promise.all(urls.map(load));
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside = inside;
      this.ready = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
