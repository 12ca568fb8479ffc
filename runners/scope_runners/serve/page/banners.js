/** Invariant: one banner a cause; a state's banner goes when the state does, a retraction's when it is closed. */
import { byId, make } from "./dom.js";

export class Banners {
  constructor() {
    this.place = byId("banners");
    this.shown = new Map();
  }

  /** Shows, changes or (with null) removes the banner of `cause`. */
  set(cause, text, { tone = "quiet", closable = false, action = null } = {}) {
    const old = this.shown.get(cause);
    if (old !== undefined && old.firstElementChild.textContent === text) return; // said once is enough
    old?.remove();
    this.shown.delete(cause);
    if (text === null) return;
    const banner = make("div", { className: "banner" }, make("p", { textContent: text }));
    banner.dataset.tone = tone;
    banner.dataset.cause = cause;
    if (action) banner.append(make("button", { type: "button", textContent: action.name, onclick: action.run }));
    if (closable) {
      const close = () => this.set(cause, null);
      banner.append(make("button", { type: "button", className: "plain", textContent: "Close", onclick: close }));
    }
    this.shown.set(cause, banner);
    this.place.append(banner);
  }

  clear() {
    for (const cause of [...this.shown.keys()]) this.set(cause, null);
  }
}
