/** Invariant: one line a command id or recovery, newest first; a line says the last thing known of its command. */
import { byId, isKnown, make, seconds, setText } from "./dom.js";

const MOST_LINES = 200;

const HERE = new Set(["pause", "resume", "record_start", "record_stop"]); // obeyed by the server, without a picture of their own
const FINAL = new Set(["refused", "superseded"]);

/** Of a bias or seed command, which its receipt has under the name of its kind. */
export const valueOf = ({ kind, fields }) => fields[kind] ?? fields.value;

/** What a command asked for, in a few words. */
export function asked({ kind, fields = {} }) {
  switch (kind) {
    case "prompt": return fields.text ?? "prompt";
    case "hard_cut": return "hard cut";
    case "bias":
    case "seed": return `${kind} ${valueOf({ kind, fields })}`;
    case "fork": return `fork from chunk ${fields.chunk_index}`;
    case "loss": return fields.why;
    case "rewind": return `rewind to chunk ${fields.chunk_index}`;
    case "record_start": return "recording started";
    case "record_stop": return "recording stopped";
    default: return kind;
  }
}

/** What became of it: one short sentence. */
export function became(receipt) {
  const { state, chunk_index: chunk, at_chunk: planned, latency_ms: latency } = receipt;
  if (state === "sending") return "waits for the server";
  if (state === "refused") return receipt.error || "refused";
  if (state === "superseded") return "replaced by a newer one";
  if (state === "pending") return isKnown(planned) ? `scheduled for chunk ${planned}` : "accepted";
  if (receipt.kind === "loss") return `pictures again after ${seconds(1000 * receipt.after_s)}, from chunk ${chunk}`;
  if (HERE.has(receipt.kind)) return `at chunk ${chunk}`;
  if (latency === null || latency === undefined) return `takes effect at chunk ${chunk}`;
  // A scheduled one was not meant to be quick.
  return isKnown(planned) ? `chunk ${chunk}, on screen` : `chunk ${chunk}, on screen after ${seconds(latency)}`;
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });

export class History {
  /** `chosen(text)`: the person wants an earlier prompt again. */
  constructor(chosen) {
    Object.assign(this, { list: byId("history"), empty: byId("history-empty"), receipts: new Map(), chosen });
  }

  /** Takes a receipt in any order: a later state is never replaced by an earlier one. */
  take(receipt) {
    const known = this.receipts.get(receipt.id);
    if (known && this.isOlder(receipt, known.receipt)) return known.receipt;
    const merged = { ...known?.receipt, ...receipt };
    if (known) this.fill(known.line, merged);
    else this.add(merged);
    this.receipts.get(merged.id).receipt = merged;
    return merged;
  }

  isOlder(receipt, known) {
    const rank = ({ state, latency_ms }) =>
      (latency_ms !== null && latency_ms !== undefined ? 4 : 0) + (FINAL.has(state) ? 4 : 0) +
      { sending: 0, pending: 1, applied: 2 }[state in { sending: 0, pending: 1, applied: 2 } ? state : "applied"];
    return rank(receipt) < rank(known);
  }

  /** A recovery of the server's list: one line, as of a command. */
  recovered({ why, lost_at, after_s, chunk_index }) {
    const [cause] = why.split(";");
    const fields = { why: `${clock(lost_at)} ${cause}` };
    this.take({ id: `loss ${lost_at}`, kind: "loss", state: "applied", posted_at: lost_at, fields, after_s, chunk_index });
  }

  add(receipt) {
    const line = make("li", {}, make("div", { className: "asked" }), make("div", { className: "became" }));
    this.receipts.set(receipt.id, { receipt, line });
    this.fill(line, receipt);
    line.dataset.at = receipt.posted_at;
    const older = [...this.list.children].find((other) => Number(other.dataset.at) <= receipt.posted_at);
    this.list.insertBefore(line, older ?? null);
    this.empty.hidden = true;
    while (this.list.children.length > MOST_LINES) this.list.lastElementChild.remove();
    if (this.receipts.size > MOST_LINES) this.receipts.delete(this.receipts.keys().next().value);
  }

  fill(line, receipt) {
    line.dataset.state = receipt.state;
    line.dataset.kind = receipt.kind;
    const text = asked(receipt);
    const first = line.firstElementChild;
    if (receipt.kind !== "prompt") setText(first, text);
    else if (first.textContent !== text) {
      const again = () => this.chosen(text);
      first.replaceChildren(make("button", { type: "button", className: "again", title: "Use this prompt again", onclick: again }, text));
    }
    setText(line.lastElementChild, became(receipt));
  }

  /** The prompts given so far, newest first. */
  prompts() {
    const texts = [...this.receipts.values()].filter(({ receipt }) => receipt.kind === "prompt").map(({ receipt }) => asked(receipt));
    return [...new Set(texts.reverse())];
  }

  clear() {
    this.receipts.clear();
    this.list.replaceChildren();
    this.empty.hidden = false;
  }
}
