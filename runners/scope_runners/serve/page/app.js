/** Invariant: the page shows one session or asks to start one; every control gives one command of the API. */
import { call, NoAnswer, Refused, sessionPath } from "./api.js";
import { Backoff } from "./backoff.js";
import { Banners } from "./banners.js";
import { byId, make, setText } from "./dom.js";
import { History } from "./history.js";
import { Measures } from "./measures.js";
import { Player } from "./player.js";
import { SessionPage } from "./session_page.js";
import { Room } from "./room.js";
import { Shortcuts } from "./shortcuts.js";
import { Strip } from "./strip.js";
import { Timeline } from "./timeline.js";
import { VideoIn } from "./video_in.js";
import { Words } from "./words.js";

let session = null;
const backoff = new Backoff();
const banners = new Banners();
const measures = new Measures();
const prompt = byId("prompt");
const player = new Player({
  video: byId("video"), canvas: byId("mjpeg"), still: byId("still"),
  told: (name, first) => session?.video(name, first),
  refused: (sentence) => banners.set("video", sentence && `No video: ${sentence}`, { tone: "warn" }),
});
const history = new History((text) => {
  prompt.value = text;
  prompt.focus();
});
const strip = new Strip({ chosen: (chunk) => (byId("chunk").value = chunk), picture: () => player.picture });
const give = (command) => session?.give(command);

function soft() {
  return { chunks: Number(byId("soft-chunks").value), method: byId("soft-method").value, bias_floor: Number(byId("soft-floor").value) };
}

new Timeline({ give, soft });
const words = new Words();
const room = new Room();
const videoIn = new VideoIn(() => session?.id ?? null);

/* ---- which session ---- */

function open(id) {
  session?.close();
  videoIn.leave();
  for (const part of [banners, history, strip, measures]) part.clear();
  setText(byId("receipt"), "");
  const address = new URL(location.href);
  address.searchParams.delete("token");
  address.searchParams.set("session", id);
  address.hash = "";
  window.history.replaceState(null, "", address);
  session = new SessionPage(id, { player, banners, history, strip, measures, videoIn, words, room }, { gone, again: start });
  choices();
}

async function listed() {
  return call("GET", "/v1/sessions");
}

async function choices() {
  const sessions = await listed().catch(() => []);
  byId("session-choice").hidden = sessions.length < 2;
  const option = ({ id, prompt: text }) => make("option", { value: id, textContent: `${id.slice(0, 8)} ${text ?? ""}`.slice(0, 40), selected: id === session?.id });
  byId("session").replaceChildren(...sessions.map(option));
}

/** The session of the address, else one that runs, else the form. */
async function find() {
  const wanted = new URL(location.href).searchParams.get("session") ?? location.hash.slice(1);
  try {
    const sessions = await listed();
    const running = sessions.filter(({ state }) => state !== "stopped" && state !== "failed");
    const found = sessions.find(({ id }) => id === wanted) ?? running.at(-1) ?? sessions.at(-1);
    banners.clear();
    if (found) open(found.id);
    else start();
  } catch (error) {
    byId("state").dataset.state = "connecting";
    const refused = error instanceof Refused;
    banners.set("link", refused ? error.message : "Connecting to the server.", { tone: refused ? "bad" : "quiet" });
    backoff.later(find);
  }
}

function gone(id, error) {
  session.close();
  banners.clear();
  const unknown = error.status === 404;
  banners.set("gone", unknown ? "This session is no longer on the server." : error.message,
    { tone: "bad", action: unknown ? { name: "Go on", run: find } : { name: "Try again", run: find } });
  byId("state").dataset.state = "stopped";
  setText(byId("state-text"), "Gone");
}

function start() {
  setText(byId("state-text"), "No session");
  byId("state").dataset.state = "stopped";
  if (!byId("start").open) byId("start").showModal();
}

byId("start-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setText(byId("start-error"), "");
  try {
    const view = await call("POST", "/v1/sessions", { prompt: byId("start-prompt").value, config: {} });
    byId("start").close();
    open(view.id);
  } catch (error) {
    setText(byId("start-error"), error.message);
  }
});
byId("session").addEventListener("change", (event) => open(event.target.value));

/* ---- steering ---- */

const change = () => document.querySelector("input[name=change]:checked").value;
let recalled = -1;

byId("prompt-form").addEventListener("change", () => (byId("soft").hidden = change() !== "soft"));
byId("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text) return;
  give({ kind: "prompt", text, ...(change() === "soft" && { transition: soft() }), ...(change() === "cut" && { hard_cut: true }) });
  prompt.select();
  recalled = -1;
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return prompt.blur();
  const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  const prompts = history.prompts();
  if (!step || !prompts.length) return;
  event.preventDefault();
  recalled = Math.min(Math.max(recalled + step, 0), prompts.length - 1);
  prompt.value = prompts[recalled];
});

function togglePause() {
  give({ kind: session?.paused ? "resume" : "pause" });
}

function toggleRecording() {
  give({ kind: session?.view?.recording ? "record_stop" : "record_start" });
}

/** The chunk that was chosen, or null with a sentence. */
function chosenChunk() {
  const { value } = byId("chunk");
  if (value !== "") return Number(value);
  byId("receipt").dataset.state = "refused";
  setText(byId("receipt"), "Choose a chunk first: in the strip of pictures, or by its number.");
  byId("chunk").focus();
  return null;
}

async function fork() {
  const chunk_index = chosenChunk();
  if (chunk_index === null || !session) return;
  const parent = session;
  try {
    const view = await call("POST", sessionPath(parent.id, "/fork"), { chunk_index });
    open(view.id);
  } catch (error) {
    parent.refused("fork", { chunk_index }, error instanceof NoAnswer ? "The server does not answer; try again." : error.message);
  }
  room.look();
}

byId("pause").onclick = togglePause;
byId("record").onclick = toggleRecording;
byId("cut").onclick = () => give({ kind: "hard_cut" });
byId("fork").onclick = fork;
byId("rewind").onclick = () => {
  const chunk_index = chosenChunk();
  if (chunk_index !== null) give({ kind: "rewind", chunk_index });
};
byId("bias").oninput = ({ target }) => setText(byId("bias-value"), Number(target.value).toFixed(2));
byId("bias").onchange = ({ target }) => give({ kind: "bias", value: Number(target.value) });
byId("seed-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (byId("seed").value !== "") give({ kind: "seed", value: Number(byId("seed").value) });
});
byId("transport").onchange = ({ target }) => player.choose(target.value);

/* ---- keys ---- */

const help = () => byId("help").showModal();
byId("help-button").onclick = help;
new Shortcuts([
  ["/", "/", "write a prompt; Enter sends it, up and down recall earlier ones, Escape leaves", () => prompt.focus()],
  [" ", "Space", "pause or resume", togglePause],
  ["x", "x", "hard cut", () => give({ kind: "hard_cut" })],
  ["r", "r", "start or stop a recording", toggleRecording],
  ["[", "[", "choose a chunk: left and right in the strip", () => byId("strip").focus()],
  ["w", "w", "rewind to the chosen chunk", () => byId("rewind").click()],
  ["f", "f", "full screen and back", () => (document.fullscreenElement ? document.exitFullscreen() : byId("stage").requestFullscreen())],
  ["?", "?", "this list", help],
]);

/* ---- leaving ---- */

// A viewer that says goodbye makes room at once; one that vanishes is noticed after half a minute.
addEventListener("pagehide", () => {
  player.drop();
  videoIn.leave();
});
addEventListener("pageshow", (event) => event.persisted && location.reload());

find();
