/** Invariant: no receipt is missed over any number of connections: a new one asks for what came after the newest
 *  `seq` heard. One may be told twice, and says the same then. Silence is a lost connection too. */
import { socketAddress, sessionPath } from "./api.js";
import { Backoff } from "./backoff.js";

const SILENCE_MS = 6000; // the server sends stats each second

export class EventLink {
  /** `heard(event)`, `linked()` and `lost(code, reason)` are called as these happen. */
  constructor(sessionId, { heard, linked, lost }) {
    Object.assign(this, { sessionId, heard, linked, lost, seq: 0, socket: null, closed: false, watch: 0, up: false });
    this.backoff = new Backoff();
    this.hurry = () => this.socket === null && !this.closed && this.open();
    addEventListener("online", this.hurry);
    this.open();
  }

  open() {
    if (this.closed) return;
    this.backoff.stop();
    const socket = new WebSocket(socketAddress(sessionPath(this.sessionId, `/events?after=${this.seq}`)));
    this.socket = socket;
    this.listen();
    socket.onmessage = (message) => this.take(JSON.parse(message.data));
    socket.onclose = (event) => socket === this.socket && this.dropped(event.code, event.reason);
  }

  take(event) {
    this.listen();
    if (!this.up) {
      this.up = true;
      this.backoff.reset();
      this.linked();
    }
    if (event.seq > this.seq) this.seq = event.seq;
    this.heard(event);
  }

  listen() {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => this.dropped(0, "silent"), SILENCE_MS);
  }

  dropped(code, reason) {
    clearTimeout(this.watch);
    const socket = this.socket;
    this.socket = null;
    if (socket) {
      socket.onmessage = socket.onclose = null;
      socket.close();
    }
    if (this.closed) return;
    this.up = false;
    this.backoff.later(() => this.open());
    this.lost(code, reason);
  }

  close() {
    this.closed = true;
    clearTimeout(this.watch);
    this.backoff.stop();
    removeEventListener("online", this.hurry);
    this.socket?.close();
  }
}
