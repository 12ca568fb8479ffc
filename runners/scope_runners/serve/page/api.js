/** Invariant: whatever the server refuses becomes one `Refused` whose message is the server's own sentence;
 *  a request that got no answer becomes `NoAnswer`, and only that one may be sent again. */

export class Refused extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

export class NoAnswer extends Error {}

/** A transport that the server did not begin. `busy`: it may at another time, and begins no other now; `isTold`:
 *  the person can do something about it. */
export class NotBegun extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.busy = [401, 403, 404, 409, 429, 502, 503].includes(status);
    this.isTold = [401, 403, 503].includes(status);
  }

  static async of(response) {
    const answer = await response.json().catch(() => undefined);
    return new NotBegun(response.status, sentence(answer, response.status));
  }
}

const ANSWER_WITHIN_MS = 15000;
const UPLOADED_WITHIN_MS = 300000;

function sentence(body, status) {
  if (typeof body?.detail === "string") return body.detail;
  if (Array.isArray(body?.detail)) return body.detail.map((part) => part.msg).join("; ");
  if (status === 401) return "Open this page once with ?token=... of the server's start message.";
  return `The server answered ${status}.`;
}

/** The answer to one request, read as JSON (undefined where it has no body). A `File` goes as it is. */
export async function call(method, path, body) {
  const isFile = body instanceof Blob;
  const headers = body === undefined || isFile ? {} : { "content-type": "application/json" };
  let response, answer;
  try {
    response = await fetch(path, {
      method, headers, body: body === undefined || isFile ? body : JSON.stringify(body),
      cache: "no-store", signal: AbortSignal.timeout(isFile ? UPLOADED_WITHIN_MS : ANSWER_WITHIN_MS),
    });
    const text = await response.text();
    answer = text && (response.headers.get("content-type") ?? "").includes("json") ? JSON.parse(text) : undefined;
  } catch (error) {
    throw new NoAnswer(`no answer from the server: ${error.message}`);
  }
  if (response.ok) return answer;
  const retryAfterS = Number(response.headers.get("retry-after")) || 1;
  throw new Refused(response.status, sentence(answer, response.status), retryAfterS);
}

export const sessionPath = (id, rest = "") => `/v1/sessions/${encodeURIComponent(id)}${rest}`;

/** An address of this server for a WebSocket. */
export function socketAddress(path) {
  const address = new URL(path, location.href);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  return address.href;
}

/** An id that no other command has; also where the page is not in a secure context. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
