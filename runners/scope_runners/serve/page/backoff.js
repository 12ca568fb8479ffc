/** Invariant: two tries are never closer than `first_ms`, nor farther apart than `most_ms` and a quarter. */
export class Backoff {
  constructor(first_ms = 250, most_ms = 4000) {
    Object.assign(this, { first_ms, most_ms, next_ms: first_ms, timer: 0 });
  }

  /** Calls `again` after the next delay; a call that is still waiting is replaced. */
  later(again) {
    clearTimeout(this.timer);
    this.timer = setTimeout(again, this.next_ms * (1 + Math.random() / 4));
    this.next_ms = Math.min(this.next_ms * 1.7, this.most_ms);
  }

  /** Calls `again` at once where one is waiting. */
  stop() {
    clearTimeout(this.timer);
  }

  reset() {
    clearTimeout(this.timer);
    this.next_ms = this.first_ms;
  }
}
