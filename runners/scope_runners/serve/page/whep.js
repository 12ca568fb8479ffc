/** Invariant: one connection a transport; its end, for whatever reason, is told once by `failed`. WHEP as in
 *  draft-ietf-wish-whep: the offer is posted whole, the answer comes with 201 and a Location. */
import { pause, Unanswered } from "./api.js";

const GATHER_MS = 400; // the server's candidates are enough where ours are late
const LOST_MS = 3000; // "disconnected" may heal by itself, this long

/** Plays packets from WebRTC in `video`. */
export class WebRtcTransport {
  static name = "WebRTC";
  static possible = () => "RTCPeerConnection" in window;

  constructor(urls, { video, failed }) {
    Object.assign(this, { url: urls.whep, element: video, failed, resource: null, ended: false });
  }

  async start() {
    this.peer = new RTCPeerConnection({ bundlePolicy: "max-bundle" });
    const receiver = this.peer.addTransceiver("video", { direction: "recvonly" }).receiver;
    if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = 0;
    this.peer.ontrack = ({ track }) => {
      this.element.srcObject = new MediaStream([track]);
      this.element.play().catch(() => {});
    };
    this.peer.onconnectionstatechange = () => this.look();
    await this.peer.setLocalDescription();
    await this.gathered();
    const response = await fetch(this.url, {
      method: "POST", headers: { "content-type": "application/sdp" },
      body: this.peer.localDescription.sdp, signal: AbortSignal.timeout(10000),
    });
    if (response.status !== 201) throw new Unanswered("WHEP", response.status);
    this.resource = response.headers.get("location");
    const sdp = await response.text();
    if (this.ended) return this.forget();
    await this.peer.setRemoteDescription({ type: "answer", sdp });
  }

  async gathered() {
    const complete = new Promise((resolve) => {
      this.peer.onicegatheringstatechange = () => this.peer.iceGatheringState === "complete" && resolve();
    });
    if (this.peer.iceGatheringState !== "complete") await Promise.race([complete, pause(GATHER_MS)]);
  }

  look() {
    clearTimeout(this.lost);
    const state = this.peer.connectionState;
    if (state === "failed" || state === "closed") this.fail(`WebRTC is ${state}`);
    if (state === "disconnected") this.lost = setTimeout(() => this.fail("WebRTC was lost"), LOST_MS);
  }

  fail(reason) {
    if (!this.ended) this.failed(reason);
  }

  forget() {
    if (this.resource) fetch(this.resource, { method: "DELETE", keepalive: true }).catch(() => {});
    this.resource = null;
  }

  stop() {
    this.ended = true;
    clearTimeout(this.lost);
    this.peer?.close();
    this.element.srcObject = null;
    this.forget();
  }
}
