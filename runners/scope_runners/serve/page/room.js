/** Invariant: Fork can be pressed where the server has room for a session more; where it has none, the server's
 *  sentence stands beside it. */
import { call } from "./api.js";
import { byId, setText } from "./dom.js";

const LOOK_MS = 5000;

export class Room {
  constructor() {
    this.ended = false;
    this.look();
    setInterval(() => document.hidden || this.look(), LOOK_MS);
  }

  /** Asks the server; one that does not answer leaves what is known. */
  async look() {
    const limits = await call("GET", "/v1/limits").catch(() => null);
    if (limits === null) return;
    this.why = limits.no_more_sessions;
    this.show();
  }

  /** Of a session that has `ended` nothing is forked. */
  of(ended) {
    this.ended = ended;
    this.show();
  }

  show() {
    byId("fork").disabled = this.ended || Boolean(this.why);
    byId("fork").title = this.why ?? "";
    byId("fork-note").hidden = !this.why;
    setText(byId("fork-note"), this.why ? `No fork now: ${this.why}.` : "");
  }
}
