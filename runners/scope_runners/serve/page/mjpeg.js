/** Invariant: one part of the multipart answer is one picture drawn; the buffer never holds more than one part
 *  and what came with it. Read with fetch and not by an <img>, which tells nothing when its stream ends. */
import { NotBegun } from "./api.js";

const MOST_BYTES = 16 << 20;

/** Where `needle` begins in `bytes`, or -1. */
function indexOf(bytes, needle, from = 0) {
  for (let at = bytes.indexOf(needle[0], from); at >= 0; at = bytes.indexOf(needle[0], at + 1)) {
    if (needle.every((byte, k) => bytes[at + k] === byte)) return at;
  }
  return -1;
}

const BLANK_LINE = [13, 10, 13, 10];
const PICTURE_START = [0xff, 0xd8, 0xff];
const PICTURE_END = [0xff, 0xd9];

export class MjpegTransport {
  static name = "MJPEG";
  static possible = () => true;

  constructor(urls, { canvas, failed, drawn }) {
    Object.assign(this, { url: urls.mjpeg, element: canvas, failed, drawn, ended: false, held: new Uint8Array(0) });
    this.abort = new AbortController();
  }

  async start() {
    const response = await fetch(this.url, { cache: "no-store", signal: this.abort.signal });
    if (!response.ok) throw await NotBegun.of(response);
    this.read(response.body.getReader()).catch((error) => this.fail(`MJPEG: ${error.message}`));
  }

  async read(reader) {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return this.fail("the MJPEG stream ended");
      const joined = new Uint8Array(this.held.length + value.length);
      joined.set(this.held);
      joined.set(value, this.held.length);
      this.held = joined;
      if (joined.length > MOST_BYTES) return this.fail("an MJPEG part is too large");
      let newest = null;
      for (let picture = this.part(); picture; picture = this.part()) newest = picture;
      if (newest) await this.draw(newest);
    }
  }

  /** The next whole picture of what is held, or null. */
  part() {
    const head = indexOf(this.held, BLANK_LINE);
    if (head < 0) return null;
    const lines = new TextDecoder("latin1").decode(this.held.subarray(0, head));
    const told = /content-length:\s*(\d+)/i.exec(lines);
    const start = indexOf(this.held, PICTURE_START, head);
    if (start < 0) return null;
    const ending = told ? start + Number(told[1]) : indexOf(this.held, PICTURE_END, start) + 2;
    if (ending < start + 4 || ending > this.held.length) return null;
    const picture = this.held.slice(start, ending);
    this.held = this.held.slice(ending);
    return picture;
  }

  async draw(bytes) {
    const picture = await createImageBitmap(new Blob([bytes], { type: "image/jpeg" }));
    if (this.ended) return;
    const { element } = this;
    if (element.width !== picture.width || element.height !== picture.height) {
      Object.assign(element, { width: picture.width, height: picture.height });
    }
    element.getContext("2d").drawImage(picture, 0, 0);
    picture.close();
    this.drawn();
  }

  fail(reason) {
    if (!this.ended) this.failed(reason);
  }

  stop() {
    this.ended = true;
    this.abort.abort();
  }
}
