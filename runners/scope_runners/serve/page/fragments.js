/** Invariant: the playhead is inside what is buffered and within a second of its end; what was played is given
 *  back. The codec is read off the init segment, so that the server need not say it twice. */
import { NotBegun, socketAddress } from "./api.js";

/** `avc1.PPCCLL` of the avcC box of an init segment. */
function codecOf(bytes) {
  for (let at = 4; at + 8 < bytes.length; at++) {
    const isBox = bytes[at] === 0x61 && bytes[at + 1] === 0x76 && bytes[at + 2] === 0x63 && bytes[at + 3] === 0x43;
    if (isBox) return "avc1." + [5, 6, 7].map((k) => bytes[at + k].toString(16).padStart(2, "0")).join("");
  }
  return null;
}

/** Plays fragmented MP4 from a WebSocket through MediaSource, near its live edge. */
export class FragmentTransport {
  static name = "fragmented MP4";
  static possible = () => "MediaSource" in window || "ManagedMediaSource" in window;

  constructor(urls, { video, failed }) {
    Object.assign(this, { url: urls.fmp4, element: video, failed, queue: [], buffer: null, ended: false });
  }

  async start() {
    this.source = new (window.MediaSource ?? window.ManagedMediaSource)();
    this.element.disableRemotePlayback = true;
    this.address = URL.createObjectURL(this.source);
    this.element.src = this.address;
    await new Promise((resolve) => this.source.addEventListener("sourceopen", resolve, { once: true }));
    if (this.ended) return;
    this.socket = new WebSocket(socketAddress(this.url));
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = ({ data }) => typeof data !== "string" && this.take(new Uint8Array(data));
    this.socket.onclose = ({ code, reason }) => this.closed(code, reason);
  }

  /** Codes from 4000 are the server's own: an HTTP status and 4000. */
  closed(code, reason) {
    if (code > 4000) this.fail(new NotBegun(code - 4000, reason));
    else this.fail("the MP4 socket closed");
  }

  take(bytes) {
    if (this.buffer === null) {
      const codec = codecOf(bytes);
      if (codec === null) return this.fail("the stream began without an init segment");
      this.buffer = this.source.addSourceBuffer(`video/mp4; codecs="${codec}"`);
      this.buffer.addEventListener("updateend", () => this.next());
    }
    this.queue.push(bytes);
    if (this.queue.length > 600) return this.fail("the browser does not keep up");
    this.next();
  }

  next() {
    if (this.ended || this.buffer.updating || this.source.readyState !== "open") return;
    try {
      this.follow();
      const oldest = this.buffer.buffered.length ? this.buffer.buffered.start(0) : 0;
      if (this.element.currentTime - oldest > 20) this.buffer.remove(0, this.element.currentTime - 8);
      else if (this.queue.length) this.buffer.appendBuffer(this.queue.shift());
    } catch (error) {
      this.fail(`MediaSource: ${error.message}`);
    }
  }

  /** Keeps the playhead inside what is buffered and near its end. */
  follow() {
    const { buffered } = this.buffer;
    if (!buffered.length) return;
    const last = buffered.length - 1;
    const [from, until] = [buffered.start(last), buffered.end(last)];
    const now = this.element.currentTime;
    if (now < from || until - now > 1) this.element.currentTime = Math.max(from, until - 0.2);
    this.element.playbackRate = until - now > 0.4 ? 1.08 : 1;
    if (this.element.paused) this.element.play().catch(() => {});
  }

  fail(reason) {
    if (!this.ended) this.failed(reason);
  }

  stop() {
    this.ended = true;
    if (this.socket) this.socket.onclose = null;
    this.socket?.close();
    this.element.playbackRate = 1;
    this.element.removeAttribute("src");
    this.element.load();
    URL.revokeObjectURL(this.address);
  }
}
