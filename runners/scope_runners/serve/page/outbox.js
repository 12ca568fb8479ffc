/** Invariant: a command the person gave is answered by one receipt: it is sent again under the same id until
 *  the server answers, in the order given, also over a restart of the server. */
import { call, NoAnswer, pause, sessionPath } from "./api.js";

const MOST_WAITING = 32;

export class Outbox {
  /** `took(receipt)` is called with what is known of a command, first as "sending". */
  constructor(sessionId, took) {
    Object.assign(this, { sessionId, took, waiting: [], busy: false, closed: false });
  }

  /** Sends `command`; its receipts carry `id`. */
  give(command, id) {
    const { kind, ...fields } = command;
    const receipt = { id, kind, fields, state: "sending", posted_at: Date.now() / 1000 };
    if (this.waiting.length >= MOST_WAITING) {
      this.took({ ...receipt, state: "refused", error: "The server does not answer and too much waits already." });
      return;
    }
    this.waiting.push({ ...command, id });
    this.took(receipt);
    this.send();
  }

  async send() {
    if (this.busy) return;
    this.busy = true;
    while (this.waiting.length && !this.closed) {
      const command = this.waiting[0];
      const receipt = await this.answer(command);
      if (receipt) {
        this.waiting.shift();
        this.took(receipt);
      }
    }
    this.busy = false;
  }

  /** The receipt, or null where it must be asked for again. */
  async answer(command) {
    const { id, kind, ...fields } = command;
    try {
      return await call("POST", sessionPath(this.sessionId, "/commands?wait_s=0"), command);
    } catch (error) {
      const again = error instanceof NoAnswer || error.status === 429 || error.status === 503;
      if (!again) return { id, kind, fields, state: "refused", error: error.message };
      await pause(1000 * Math.min(error.retryAfterS ?? 0.5, 5));
      return null;
    }
  }

  close() {
    this.closed = true;
  }
}
