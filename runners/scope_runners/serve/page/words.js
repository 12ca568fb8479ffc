/** Invariant: what is offered to complete a prompt are words that its text encoder knows; where it reads any text,
 *  nothing is offered and no hint is shown. */
import { byId, make, setText } from "./dom.js";

export class Words {
  constructor() {
    this.words = [];
    byId("prompt").addEventListener("input", () => this.offer());
  }

  /** All words that a prompt may name; empty where it may be any text. */
  know(words) {
    if (words.join() === this.words.join()) return;
    this.words = words;
    byId("words").hidden = !words.length;
    setText(byId("words"), words.length ? `Words it knows: ${words.join(", ")}.` : "");
    this.offer();
  }

  /** Completes the word that is being typed: an option of a list replaces the whole text. */
  offer() {
    const [, before, begun] = byId("prompt").value.match(/^(.*?)(\w*)$/s);
    const fitting = begun ? this.words.filter((word) => word !== begun && word.startsWith(begun.toLowerCase())) : [];
    byId("word-list").replaceChildren(...fitting.map((word) => make("option", { value: before + word })));
  }
}
