/** Invariant: one connection a transport; its end, for whatever reason, is told once by `failed`. */
import { pause } from "./api.js";
import { offer } from "./peer.js";

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
    const { answer, location } = await offer(this.peer, this.url);
    this.resource = location;
    if (this.ended) return this.forget();
    await this.peer.setRemoteDescription(answer);
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

  /** Ends it at the server, and then here: a closed peer would be gone there before it is asked to go. */
  async forget() {
    const { resource } = this;
    this.resource = null;
    const told = resource && fetch(resource, { method: "DELETE", keepalive: true }).catch(() => {});
    await Promise.race([told, pause(1000)]);
    this.peer?.close();
  }

  /** `isServerThere`: whether there is anyone to tell. */
  stop(isServerThere) {
    this.ended = true;
    clearTimeout(this.lost);
    this.element.srcObject = null;
    if (!isServerThere) this.resource = null;
    this.forget();
  }
}
