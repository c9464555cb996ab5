// Browsers start no Worker for a page opened from disk. This one runs the worker's script in a
// hidden frame instead, so that the site's search works there too.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const address = new URL(url, location.href).href;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.scope = this.frame.contentWindow;
      this.scope.document.open();
      this.scope.document.write("<!doctype html><body>");
      this.scope.document.close();
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one, address)));
      this.ready = this.load(address, address);
    }

    load(url, base) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = new URL(url, base).href;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
