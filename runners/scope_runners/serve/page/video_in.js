/** Invariant: the camera is on only while the stream takes its pictures; what the note says of the input is what
 *  the server has. */
import { call, sessionPath } from "./api.js";
import { byId, setText } from "./dom.js";
import { offer } from "./peer.js";

const HINT = "Pictures steer the stream: little noise keeps them, much noise follows the prompt.";
const CAMERA = { video: { width: { ideal: 640 }, frameRate: { ideal: 30 } } };

export class VideoIn {
  /** `session()` is the id of the session shown, or null. */
  constructor(session) {
    Object.assign(this, { session, peer: null, media: null, again: null });
    byId("input-file-button").onclick = () => byId("input-file").click();
    byId("input-file").onchange = ({ target }) => {
      const [file] = target.files;
      target.value = "";
      if (file) this.begin(() => this.file(file));
    };
    byId("input-camera").onclick = () => this.begin(() => this.camera());
    byId("input-end").onclick = () => this.end();
    byId("noise").oninput = ({ target }) => setText(byId("noise-value"), Number(target.value).toFixed(2));
    byId("noise").onchange = () => this.again && this.begin(this.again);
    this.show(null);
  }

  path(rest) {
    const noise = byId("noise").value;
    return sessionPath(this.session(), `${rest}?noise_low=${noise}&noise_high=${noise}`);
  }

  /** Runs `source`, which takes the place of one before; `again` is asked for where the noise changes. */
  async begin(source) {
    if (this.session() === null) return;
    this.again = source;
    setText(byId("input-note"), "Connecting the pictures ...");
    try {
      await source();
      this.show((await call("GET", sessionPath(this.session(), "/input"))).input);
    } catch (error) {
      this.leave();
      setText(byId("input-note"), error.name === "NotAllowedError" ? "The browser was not allowed to use the camera." : error.message);
    }
  }

  async file(file) {
    this.release();
    await call("POST", this.path("/input"), file);
  }

  async camera() {
    if (!navigator.mediaDevices) throw new Error("Browsers give a camera to pages of this machine and to https alone.");
    this.release();
    const media = await navigator.mediaDevices.getUserMedia(CAMERA);
    const peer = new RTCPeerConnection({ bundlePolicy: "max-bundle" });
    Object.assign(this, { media, peer });
    for (const track of media.getTracks()) peer.addTransceiver(track, { direction: "sendonly", streams: [media] });
    peer.onconnectionstatechange = () => {
      if (peer !== this.peer || peer.connectionState !== "failed") return;
      this.leave();
      setText(byId("input-note"), "The camera's connection was lost.");
    };
    const { answer } = await offer(peer, this.path("/whip"));
    if (peer === this.peer) await peer.setRemoteDescription(answer);
  }

  async end() {
    this.leave();
    try {
      await call("DELETE", sessionPath(this.session(), "/input"));
      this.show(null);
    } catch (error) {
      setText(byId("input-note"), error.message);
    }
  }

  /** What the server takes pictures from, of its view of the session; nothing where none are taken. */
  show(input) {
    byId("input-end").hidden = !input;
    const told = input && `The stream follows the ${input.source}, with noise ${input.noise_high.toFixed(2)}.`;
    setText(byId("input-note"), told ?? HINT);
  }

  release() {
    this.media?.getTracks().forEach((track) => track.stop());
    this.peer?.close();
    this.media = this.peer = null;
  }

  /** Gives the camera back; nothing is begun again by itself. */
  leave() {
    this.release();
    this.again = null;
  }
}
