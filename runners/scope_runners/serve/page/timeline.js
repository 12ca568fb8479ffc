/** Invariant: what is shown is what is scheduled, saved and loaded; a loaded file is checked entry by entry and
 *  taken whole or not at all. The draft survives a reload in this browser. */
import { byId, make, setText } from "./dom.js";

const KEPT_AS = "scope-rt timeline";
const MOST_ENTRIES = 64;
const NEW = { text: "", change: "now", chunks: 4 };

/** The entries of a file or of the browser's storage; throws one sentence. */
function checked(value) {
  const entries = Array.isArray(value) ? value : value?.entries;
  if (!Array.isArray(entries)) throw new Error("The file holds no list of entries.");
  if (entries.length > MOST_ENTRIES) throw new Error(`A timeline has ${MOST_ENTRIES} entries at most.`);
  return entries.map((entry, k) => {
    const { in_chunks, text, transition, hard_cut } = entry ?? {};
    if (!Number.isInteger(in_chunks) || in_chunks < 0) throw new Error(`Entry ${k + 1}: in_chunks must be a whole number from 0.`);
    if (typeof text !== "string" || text === "") throw new Error(`Entry ${k + 1}: text must be a prompt.`);
    return { in_chunks, text, change: hard_cut ? "cut" : transition ? "soft" : "now", chunks: transition?.chunks ?? 4 };
  });
}

export class Timeline {
  /** `give(command)` sends a command; an entry is a prompt command but for its kind; `soft()` is the transition now set by the prompt box. */
  constructor({ give, soft }) {
    Object.assign(this, { give, soft, list: byId("timeline"), note: byId("timeline-note"), entries: [] });
    byId("timeline-add").onclick = () => this.add();
    byId("timeline-run").onclick = () => this.run();
    byId("timeline-save").onclick = () => this.save();
    byId("timeline-load").onclick = () => byId("timeline-file").click();
    byId("timeline-file").onchange = (event) => this.load(event.target);
    try {
      this.entries = checked(JSON.parse(localStorage.getItem(KEPT_AS) ?? "[]"));
    } catch {
      this.entries = []; // an older or broken draft is not worth a question
    }
    this.show();
  }

  /** As the API and the file have them. */
  written() {
    return this.entries.filter((entry) => entry.text.trim()).map(({ in_chunks, text, change, chunks }) => ({
      in_chunks, text: text.trim(),
      ...(change === "soft" && { transition: { ...this.soft(), chunks } }),
      ...(change === "cut" && { hard_cut: true }),
    }));
  }

  keep() {
    try {
      localStorage.setItem(KEPT_AS, JSON.stringify(this.written()));
    } catch (error) {
      this.say(`The draft could not be kept: ${error.message}`);
    }
  }

  add() {
    const last = this.entries.at(-1);
    this.entries.push({ ...NEW, in_chunks: last ? last.in_chunks + 8 : 8 });
    this.show();
    this.list.lastElementChild.querySelector("input[type=text]").focus();
  }

  run() {
    const entries = this.written();
    if (!entries.length) return this.say("Nothing to schedule yet: press Add, and write a prompt into the new line.");
    for (const entry of entries) this.give({ kind: "prompt", ...entry });
    this.say(`${entries.length} ${entries.length === 1 ? "prompt" : "prompts"} given; the chunks count from now.`);
  }

  save() {
    const text = JSON.stringify({ entries: this.written() }, null, 2);
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async load(input) {
    try {
      this.entries = checked(JSON.parse(await input.files[0].text()));
      this.show();
      this.keep();
      this.say(`${this.entries.length} prompts loaded.`);
    } catch (error) {
      this.say(error instanceof SyntaxError ? "The file is not JSON." : error.message);
    }
    input.value = "";
  }

  say(text) {
    setText(this.note, text);
  }

  show() {
    this.list.replaceChildren(...this.entries.map((entry, k) => this.row(entry, k + 1)));
  }

  row(entry, number) {
    const changed = (name, read) => (event) => {
      entry[name] = read(event.target);
      this.keep();
    };
    const whole = (input) => Math.max(0, Math.round(Number(input.value) || 0));
    const options = [["now", "at once"], ["soft", "softly"], ["cut", "hard cut"]];
    const remove = () => {
      this.entries.splice(this.entries.indexOf(entry), 1);
      this.show();
      this.keep();
      byId("timeline-add").focus();
    };
    return make("li", {},
      make("input", { type: "text", value: entry.text, maxLength: 2000, placeholder: "prompt", "aria-label": `Prompt ${number}`,
        oninput: changed("text", (input) => input.value) }),
      make("label", {}, "in ", make("input", { type: "number", min: 0, value: entry.in_chunks, oninput: changed("in_chunks", whole),
        "aria-label": `Prompt ${number}: chunks from now` }), " chunks"),
      make("select", { "aria-label": `Prompt ${number}: how it comes in`, onchange: changed("change", (select) => select.value) },
        ...options.map(([value, name]) => make("option", { value, textContent: name, selected: entry.change === value }))),
      make("button", { type: "button", className: "plain", textContent: "Remove", "aria-label": `Remove prompt ${number}`, onclick: remove }));
  }
}
