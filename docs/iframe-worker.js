/* Search from a folder, without a server. A page of file:// may start no Worker, so the code of one runs in a hidden frame.
   Material's search asks for this class by its name; mkdocs.yml loads it before all other scripts. */
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.ready = new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => resolve(inside);
      script.onerror = reject;
      inside.document.body.appendChild(script);
    });
  }

  postMessage(data) {
    this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = IFrameWorker;
window.IFrameWorker = IFrameWorker;
