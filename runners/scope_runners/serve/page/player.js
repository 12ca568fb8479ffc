/** Invariant: there is always a picture once there was one: what was last shown stays until the next transport
 *  shows its first. A transport that fails is tried again; in automatic mode the next one is tried where it was
 *  refused twice, or the server showed chunks and no picture came. None is tried while the server is away. */
import { Backoff } from "./backoff.js";
import { FragmentTransport } from "./fragments.js";
import { MjpegTransport } from "./mjpeg.js";
import { WebRtcTransport } from "./whep.js";

const KINDS = { webrtc: WebRtcTransport, fmp4: FragmentTransport, mjpeg: MjpegTransport };
const LATE_MS = 4000; // a picture of a chunk that the server has shown
const MOST_MISSES = 2;

export class Player {
  /** `told(name, first)`: a transport shows its first picture, or is tried (`first` false).
   *  `refused(sentence)`: the server shows this page no video, for a reason that a person can change; null: it does. */
  constructor({ video, canvas, still, told, refused }) {
    Object.assign(this, { video, canvas, still, told, refused, urls: null, wanted: "auto", at: 0, misses: 0 });
    Object.assign(this, { transport: null, showing: false, watch: 0 });
    this.backoff = new Backoff(300, 5000);
    this.order = Object.keys(KINDS).filter((kind) => KINDS[kind].possible());
    this.onFrame = this.onFrame.bind(this);
  }

  get kind() {
    return this.wanted === "auto" ? this.order[this.at % this.order.length] : this.wanted;
  }

  /** The element that shows the picture now; the kept still where no transport does. */
  get picture() {
    return this.showing ? this.transport.element : this.still;
  }

  choose(wanted) {
    this.wanted = wanted;
    this.at = this.misses = 0;
    if (this.urls) this.restart();
  }

  /** The server is there: play. */
  play(urls) {
    if (this.urls && this.transport) return;
    this.urls = urls;
    this.at = this.misses = 0;
    this.restart();
  }

  /** The server is away: keep the last picture and wait. */
  halt() {
    this.urls = null;
    this.backoff.reset();
    this.drop();
  }

  /** The server shows a chunk now: a picture is due. Where it shows none (paused, recovering), none is missed. */
  due() {
    if (this.watch || !this.transport || document.hidden) return;
    this.watch = setTimeout(() => this.late(), LATE_MS);
  }

  late() {
    this.watch = 0;
    if (document.hidden) return; // a page in the background is given no frames
    if (!this.showing) this.misses = MOST_MISSES;
    this.failed("no picture came");
  }

  restart() {
    this.backoff.stop();
    this.drop();
    if (!this.urls) return;
    const transport = new KINDS[this.kind](this.urls, {
      video: this.video, canvas: this.canvas,
      failed: (reason) => transport === this.transport && this.failed(reason),
      drawn: () => transport === this.transport && this.onFrame(),
    });
    this.transport = transport;
    this.told(KINDS[this.kind].name, false);
    if (transport.element === this.video) this.ask();
    transport.start().catch((error) => transport === this.transport && this.failed(error));
  }

  /** One callback for the next frame of the video element. */
  ask() {
    if ("requestVideoFrameCallback" in this.video) this.asked = this.video.requestVideoFrameCallback(this.onFrame);
    else this.video.ontimeupdate = this.onFrame;
  }

  onFrame() {
    if (!this.transport) return;
    this.settle();
    if (!this.showing) {
      this.showing = true;
      this.misses = 0;
      this.refused(null);
      this.backoff.reset();
      this.lay(this.transport.element);
      this.told(KINDS[this.kind].name, true);
    }
    if (this.transport.element === this.video) this.ask();
  }

  settle() {
    clearTimeout(this.watch);
    this.watch = 0;
  }

  /** `reason`: a sentence, or a `NotBegun` of the server. */
  failed(reason) {
    console.info(`video by ${this.kind}: ${reason}`);
    if (reason.isTold) this.refused(reason.message);
    if (!this.showing && !reason.busy) this.misses += 1;
    if (this.wanted === "auto" && this.misses >= MOST_MISSES) {
      this.at += 1;
      this.misses = 0;
    }
    this.drop();
    this.backoff.later(() => this.restart());
  }

  /** Ends the transport and leaves its last picture standing. */
  drop() {
    this.settle();
    this.keep();
    const transport = this.transport;
    this.transport = null;
    this.showing = false;
    if (this.asked !== undefined) this.video.cancelVideoFrameCallback?.(this.asked);
    this.video.ontimeupdate = null;
    transport?.stop(this.urls !== null);
    this.lay(this.still);
  }

  /** Shows one layer; the others stay laid out, for a browser gives no frames of what is not. */
  lay(shown) {
    for (const layer of [this.video, this.canvas, this.still]) layer.classList.toggle("off", layer !== shown);
  }

  keep() {
    const { picture, still } = this;
    if (picture === still) return;
    const [width, height] = [picture.videoWidth ?? picture.width, picture.videoHeight ?? picture.height];
    if (!width || !height) return;
    Object.assign(still, { width, height });
    still.getContext("2d").drawImage(picture, 0, 0, width, height);
  }
}
