/** Invariant: an offer is sent whole, with the candidates that were there in time; what the other side does not
 *  take is one `NotBegun`. As WHIP (RFC 9725) and WHEP (draft-ietf-wish-whep) have it. */
import { NotBegun, pause } from "./api.js";

const GATHER_MS = 400; // the server's candidates are enough where ours are late
const ANSWER_WITHIN_MS = 10000;

async function gathered(peer) {
  const complete = new Promise((resolve) => {
    peer.onicegatheringstatechange = () => peer.iceGatheringState === "complete" && resolve();
  });
  if (peer.iceGatheringState !== "complete") await Promise.race([complete, pause(GATHER_MS)]);
}

/** Posts the offer of `peer`; returns what the other side answered and where the connection is ended. */
export async function offer(peer, url) {
  await peer.setLocalDescription();
  await gathered(peer);
  const response = await fetch(url, {
    method: "POST", headers: { "content-type": "application/sdp" },
    body: peer.localDescription.sdp, signal: AbortSignal.timeout(ANSWER_WITHIN_MS),
  });
  if (response.status !== 201) throw await NotBegun.of(response);
  return { answer: { type: "answer", sdp: await response.text() }, location: response.headers.get("location") };
}
