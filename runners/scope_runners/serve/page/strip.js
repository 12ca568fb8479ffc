/** Invariant: one cell a chunk shown, in order of showing; a retracted chunk stays visible as retracted,
 *  and one that a rewind or a recovery undid goes with the chunk that takes its place. */
import { byId, make } from "./dom.js";

const MOST_CELLS = 160;
const SHOWN_AFTER_MS = 400;
const CELL_HEIGHT = 48; // pixels of the picture; the page scales it down

export class Strip {
  /** `chosen(chunkIndex)`; `picture()` is the element that shows the stream now. */
  constructor({ chosen, picture }) {
    Object.assign(this, { place: byId("strip"), chosen, picture, cells: [], selected: null, count: 0, at: 0 });
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("click", (event) => this.select(event.target.closest("[role=option]")));
  }

  /** A chunk has come; its first frames are still on their way to this browser. */
  add(chunk) {
    const { at } = this;
    setTimeout(() => at === this.at && this.append(chunk), SHOWN_AFTER_MS);
  }

  append({ chunk_index: chunk, cache_epoch: epoch, prompt }) {
    const before = this.cells.at(-1)?.dataset;
    const canvas = make("canvas", { height: CELL_HEIGHT, width: CELL_HEIGHT });
    const cell = make("div", { role: "option", className: "cell", id: `cell-${(this.count += 1)}`, title: `chunk ${chunk}: ${prompt}`,
      "aria-label": `chunk ${chunk}, epoch ${epoch}: ${prompt}`, "aria-selected": "false" }, canvas);
    Object.assign(cell.dataset, { chunk, epoch, prompt });
    cell.classList.toggle("cut", before !== undefined && (before.epoch !== String(epoch) || Number(before.chunk) >= chunk));
    this.undo(chunk);
    cell.classList.toggle("turn", before !== undefined && before.prompt !== prompt);
    this.draw(canvas);
    this.cells.push(cell);
    const atEnd = this.place.scrollLeft + this.place.clientWidth > this.place.scrollWidth - 120;
    this.place.append(cell);
    if (this.cells.length > MOST_CELLS) this.cells.shift().remove();
    if (atEnd) this.place.scrollLeft = this.place.scrollWidth;
  }

  /** The stream continues with `chunk`: what it showed of it and of later ones is no longer part of it. */
  undo(chunk) {
    const isUndone = (cell) => Number(cell.dataset.chunk) >= chunk && !cell.classList.contains("retracted");
    for (const cell of this.cells.filter(isUndone)) {
      if (cell === this.selected) this.selected = null;
      cell.remove();
    }
    this.cells = this.cells.filter((cell) => !isUndone(cell));
  }

  draw(canvas) {
    const picture = this.picture();
    const [width, height] = [picture.videoWidth ?? picture.width, picture.videoHeight ?? picture.height];
    if (!width || !height) return;
    canvas.width = Math.round((CELL_HEIGHT * width) / height);
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, CELL_HEIGHT);
  }

  retract(first, last) {
    for (const cell of this.cells) {
      const chunk = Number(cell.dataset.chunk);
      if (chunk >= first && chunk <= last) cell.classList.add("retracted");
    }
  }

  select(cell) {
    if (!cell) return;
    this.selected?.setAttribute("aria-selected", "false");
    this.selected = cell;
    cell.setAttribute("aria-selected", "true");
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.place.setAttribute("aria-activedescendant", cell.id);
    this.chosen(Number(cell.dataset.chunk));
  }

  key(event) {
    const at = this.selected ? this.cells.indexOf(this.selected) : this.cells.length;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.cells.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.select(this.cells[Math.min(Math.max(next, 0), this.cells.length - 1)]);
  }

  clear() {
    this.at += 1; // what is under way is of another session
    this.cells = [];
    this.selected = null;
    this.place.replaceChildren();
    this.place.removeAttribute("aria-activedescendant");
  }
}
