/** Invariant: everything the page shows of a session comes from that session's events; one object holds it all,
 *  and `close` leaves nothing of it running. */
import { call, newId, Refused, sessionPath } from "./api.js";
import { byId, isKnown, setText } from "./dom.js";
import { EventLink } from "./events.js";
import { became, valueOf } from "./history.js";
import { showRanks, showRecordings } from "./measures.js";
import { Outbox } from "./outbox.js";

const STATES = {
  connecting: "Connecting", starting: "Starting", live: "Live", paused: "Paused", recovering: "Recovering",
  degraded: "Degraded", stopped: "Stopped", failed: "Failed", stopping: "Stopping",
};
const ENDED = new Set(["stopped", "failed"]);
const FLOWING = new Set(["live", "degraded"]);
const PLAYABLE = new Set(["live", "paused", "recovering", "degraded"]);

const keyOf = ({ first_chunk, last_chunk, reason }) => `${first_chunk} ${last_chunk} ${reason}`;

/** What a state's banner says; null where none is needed. */
function told(state, detail) {
  const because = detail ? `: ${detail.replace(/\.$/, "")}.` : ".";
  switch (state) {
    case "starting": return `Starting the ranks${because}`;
    case "recovering": return `Recovering${because} The last picture stays until the next chunk.`;
    case "degraded": return `Degraded${because}`;
    case "stopping": return `Stopping${because}`;
    case "stopped": return `The session has stopped${because}`;
    case "failed": return `The session has failed${because}`;
    default: return null;
  }
}

export class SessionPage {
  /** `parts`: player, banners, history, strip, measures, videoIn, words, room; `gone(id, error)` where the server has no such session. */
  constructor(id, parts, { gone, again }) {
    Object.assign(this, { id, ...parts, gone, again, view: null, toldRetractions: null, watched: null, leaseTimer: 0, closed: false, biasKnown: false });
    this.outbox = new Outbox(id, (receipt) => this.receipt(receipt));
    this.link = new EventLink(id, {
      heard: (event) => this.heard(event), linked: () => this.linked(), lost: (code, reason) => this.lost(code, reason),
    });
    this.show("connecting");
  }

  give(command) {
    this.watched = newId();
    this.outbox.give(command, this.watched);
  }

  /** What the server refused beside its commands: told and kept as theirs are. */
  refused(kind, fields, error) {
    this.watched = newId();
    this.receipt({ id: this.watched, kind, fields, state: "refused", error, posted_at: Date.now() / 1000 });
  }

  get paused() {
    return this.view !== null && (this.view.paused || this.view.state === "paused");
  }

  heard(event) {
    switch (event.type) {
      case "state": return this.state(event.session);
      case "stats": return this.measures.take(event.stats);
      case "chunk": return this.chunk(event);
      case "receipt": return this.receipt(event.receipt);
      case "retracted": return this.tellRetracted(event);
      case "recording": return this.recording(event);
      case "rank": return this.rank(event);
      default: return undefined; // a newer server may tell more
    }
  }

  async linked() {
    this.banners.set("link", null);
    try {
      const [view, receipts] = await Promise.all([
        call("GET", sessionPath(this.id)), call("GET", sessionPath(this.id, "/commands")),
      ]);
      if (this.closed) return;
      for (const receipt of receipts) this.receipt(receipt);
      this.state(view);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) this.gone(this.id, error);
    }
  }

  async lost(code, reason) {
    this.player.halt();
    this.show("connecting");
    const unanswered = this.view === null ? "Connecting to the server." : "The server does not answer. The page goes on trying; the last picture stays.";
    this.banners.set("link", code > 4000 ? reason : unanswered); // those are the server's own words
    try {
      await call("GET", sessionPath(this.id));
    } catch (error) {
      if (!this.closed && error instanceof Refused && [401, 403, 404].includes(error.status)) this.gone(this.id, error);
    }
  }

  state(view) {
    if (this.closed) return;
    this.view = view;
    const { state, detail, fps, width, height, plan, tp } = view;
    this.show(state);
    setText(byId("about"), [plan && tp > 1 ? `${plan}, tp ${tp}` : plan, width && `${width} × ${height}`, fps && `${fps} frames/s`].filter(Boolean).join(" · "));
    const ended = ENDED.has(state);
    const action = ended ? { name: "Start another", run: () => this.again() } : null;
    this.banners.set("state", told(state, detail), { tone: ended ? "bad" : state === "starting" ? "quiet" : "warn", action });
    const broken = view.broken_on_purpose ? `Broken on purpose: ${view.broken_on_purpose}.` : null;
    this.banners.set("broken", broken, { tone: "warn" });
    if (width && height) byId("stage").style.setProperty("--aspect", `${width} / ${height}`);
    this.measures.setGoal(fps ?? null);
    this.controls(view);
    if (PLAYABLE.has(state)) this.player.play({ whep: sessionPath(this.id, "/whep"), fmp4: sessionPath(this.id, "/stream.fmp4"), mjpeg: sessionPath(this.id, "/stream.mjpeg") });
    else this.player.halt();
    if (!FLOWING.has(state)) this.player.settle();
    this.videoIn.show(view.input);
    this.words.know(view.prompt_words);
    setText(byId("now"), view.prompt);
    for (const recovery of view.recoveries) this.history.recovered(recovery);
    this.lookBack(view.retractions);
    this.lease(view.lease_s);
  }

  controls(view) {
    setText(byId("pause"), this.paused ? "Resume" : "Pause");
    byId("pause").setAttribute("aria-pressed", String(this.paused));
    setText(byId("record"), view.recording ? "Stop recording" : "Record");
    byId("record").setAttribute("aria-pressed", String(Boolean(view.recording)));
    byId("recording-chip").hidden = !view.recording;
    setText(byId("recording-name"), view.recording ? `Recording ${view.recording}` : "");
    showRanks(view.ranks);
    showRecordings(view.recordings, (name) => sessionPath(this.id, `/recordings/${encodeURIComponent(name)}`));
    const ended = ENDED.has(view.state);
    for (const id of ["pause", "cut", "record", "send", "rewind"]) byId(id).disabled = ended;
    this.room.of(ended);
    if (!this.biasKnown && isKnown(view.resting_bias)) this.bias(view.resting_bias);
  }

  bias(value) {
    this.biasKnown = true;
    byId("bias").value = value;
    setText(byId("bias-value"), Number(value).toFixed(2));
  }

  chunk(event) {
    const { chunk_index, cache_epoch, prompt } = event;
    this.strip.add(event);
    if (this.view === null) return;
    Object.assign(this.view, { chunk_index, cache_epoch });
    setText(byId("now"), prompt);
    if (FLOWING.has(this.view.state)) this.player.due();
    byId("chunk").placeholder = String(chunk_index);
    this.chip();
  }

  chip() {
    const { chunk_index: chunk, cache_epoch: epoch } = this.view ?? {};
    const parts = !isKnown(chunk) ? [] : [`chunk ${chunk}`, `epoch ${epoch}`];
    setText(byId("mode"), [...parts, this.mode].filter(Boolean).join(" · "));
  }

  /** A transport is tried (`first` false) or shows its first picture. */
  video(name, first) {
    this.mode = first ? name : `connecting ${name}`;
    this.chip();
  }

  receipt(receipt) {
    if (this.closed) return;
    const latest = this.history.take(receipt);
    if (latest.kind === "bias" && latest.state === "applied") this.bias(valueOf(latest));
    if (latest.id !== this.watched) return;
    const place = byId("receipt");
    place.dataset.state = latest.state;
    const text = became(latest);
    setText(place, text[0].toUpperCase() + text.slice(1));
  }

  /** What was retracted while this page heard nothing; what was so before it was opened is past. */
  lookBack(retractions) {
    const isFirst = this.toldRetractions === null;
    this.toldRetractions ??= new Set();
    for (const retraction of retractions) {
      if (isFirst) this.toldRetractions.add(keyOf(retraction));
      else this.tellRetracted(retraction);
    }
  }

  tellRetracted(retraction) {
    const { first_chunk: first, last_chunk: last, reason } = retraction;
    if (this.toldRetractions?.has(keyOf(retraction))) return;
    this.toldRetractions?.add(keyOf(retraction));
    const chunks = first === last ? `Chunk ${first} was` : `Chunks ${first} to ${last} were`;
    this.strip.retract(first, last);
    this.banners.set(`retracted ${keyOf(retraction)}`, `${chunks} retracted: ${reason.replace(/\.$/, "")}.`, { tone: "bad", closable: true });
  }

  async recording({ state, name, detail, error }) {
    const why = detail ?? error;
    if (why) this.banners.set(`recording ${name}`, `Recording ${name}: ${why}`, { tone: "warn", closable: true });
    try {
      this.state(await call("GET", sessionPath(this.id)));
    } catch {
      // the next state event tells the same
    }
  }

  rank({ rank, state, detail }) {
    if (!this.view?.ranks) return;
    const known = this.view.ranks.find((entry) => entry.rank === rank);
    if (known) Object.assign(known, { state, detail });
    showRanks(this.view.ranks);
  }

  lease(lease_s) {
    clearInterval(this.leaseTimer);
    if (!lease_s) return;
    const renew = () => call("POST", sessionPath(this.id, "/lease")).catch(() => {});
    this.leaseTimer = setInterval(renew, Math.max(1, lease_s / 3) * 1000);
  }

  show(state) {
    byId("state").dataset.state = state;
    setText(byId("state-text"), STATES[state] ?? state);
    document.title = `${STATES[state] ?? state} – scope-rt`;
  }

  close() {
    this.closed = true;
    clearInterval(this.leaseTimer);
    this.link.close();
    this.outbox.close();
    this.player.halt();
  }
}
