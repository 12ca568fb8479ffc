/** Invariant: a key does nothing of ours while text is being typed or with a modifier held; every shortcut is
 *  in the list that ? shows. */
import { byId, make } from "./dom.js";

const TYPED = "input:not([type=range], [type=radio]), textarea, select, [contenteditable]";

export class Shortcuts {
  /** `keys`: [key, shown as, what it does, function]. */
  constructor(keys) {
    this.run = new Map(keys.map(([key, , , run]) => [key, run]));
    for (const [, shown, text] of keys) byId("help-list").append(make("div", {}, make("dt", {}, make("kbd", {}, shown)), make("dd", {}, text)));
    addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.target.closest(TYPED) || document.querySelector("dialog[open]")) return;
    // Space and Enter press the button that has the focus.
    if (event.key === " " && event.target.closest("button, a, input, [role=option]")) return;
    const run = this.run.get(event.key);
    if (!run) return;
    event.preventDefault();
    run();
  }
}
