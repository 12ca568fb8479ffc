/** Invariant: a chart holds the last `MOST_POINTS` values and no more; its caption says in words what its line
 *  shows. Drawn as SVG, coloured by the stylesheet alone. */
import { make, setText } from "./dom.js";

export const MOST_POINTS = 120; // two minutes at one value a second
const [WIDTH, HEIGHT] = [240, 56];
const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

class Chart {
  constructor(title) {
    this.value = make("span", { className: "value" }, "–");
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const caption = make("figcaption", {}, make("span", { className: "name" }, title), this.value);
    this.element = make("figure", { className: "chart" }, caption, this.svg);
  }

  say(text) {
    setText(this.value, text);
  }
}

/** Lines over the last two minutes. A value of null leaves a gap. */
export class LineChart extends Chart {
  /** `names`: one class a line; `floor`: the least top of the scale; `stepped`: no slopes between values. */
  constructor(title, names, { floor = 1, top = null, stepped = false } = {}) {
    super(title);
    Object.assign(this, { names, floor, top, stepped, points: names.map(() => []), goal: null });
    this.goalLine = draw("path", { class: "goal" });
    this.lines = names.map((name) => draw("path", { class: `line ${name}` }));
    this.svg.append(this.goalLine, ...this.lines);
  }

  add(values, text) {
    this.points.forEach((points, k) => {
      points.push(values[k] ?? null);
      if (points.length > MOST_POINTS) points.shift();
    });
    this.say(text);
    this.show();
  }

  show() {
    const known = this.points.flat().filter((value) => value !== null);
    const top = this.top ?? Math.max(this.floor, this.goal ?? 0, ...known) * 1.12;
    const y = (value) => (HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 4)).toFixed(1);
    this.lines.forEach((line, k) => line.setAttribute("d", this.path(this.points[k], y)));
    this.goalLine.setAttribute("d", this.goal === null ? "" : `M0 ${y(this.goal)}H${WIDTH}`);
  }

  path(points, y) {
    const step = WIDTH / (MOST_POINTS - 1);
    const left = WIDTH - (points.length - 1) * step;
    let d = "", pen = false;
    points.forEach((value, k) => {
      if (value === null) return void (pen = false);
      const x = (left + k * step).toFixed(1);
      d += !pen ? `M${x} ${y(value)}` : this.stepped ? `H${x}V${y(value)}` : `L${x} ${y(value)}`;
      pen = true;
    });
    return d;
  }

  clear() {
    this.points.forEach((points) => (points.length = 0));
    this.show();
    this.say("–");
  }
}

/** One bar a stage: its median, with a mark at its 95th percentile. */
export class StageChart extends Chart {
  constructor(title) {
    super(title);
    this.rows = make("ul", { className: "stages" });
    this.svg.replaceWith(this.rows);
    this.known = new Map();
  }

  /** `stages`: {name: {p50, p95}} in ms. */
  set(stages, text) {
    const top = Math.max(1, ...Object.values(stages).map(({ p95 }) => p95 ?? 0));
    for (const [name, { p50, p95 }] of Object.entries(stages)) {
      const row = this.known.get(name) ?? this.row(name);
      row.bar.style.width = `${(100 * (p50 ?? 0)) / top}%`;
      row.mark.style.left = `${(100 * (p95 ?? 0)) / top}%`;
      setText(row.figures, `${number(p50)} / ${number(p95)}`);
    }
    for (const [name, row] of this.known) {
      if (name in stages) continue;
      row.element.remove();
      this.known.delete(name);
    }
    this.say(text);
  }

  row(name) {
    const [bar, mark] = [make("span", { className: "bar" }), make("span", { className: "mark" })];
    const figures = make("span", { className: "figures" });
    const element = make("li", {}, make("span", { className: "stage-name" }, name.replaceAll("_", " ")), make("span", { className: "track" }, bar, mark), figures);
    this.rows.append(element);
    const row = { element, bar, mark, figures };
    this.known.set(name, row);
    return row;
  }

  clear() {
    this.set({}, "–");
  }
}

/** One mark a second, by class: good, bad, unknown. */
export class MarkChart extends Chart {
  constructor(title) {
    super(title);
    this.marks = [];
    this.bars = ["good", "unknown", "bad"].map((name) => [name, draw("path", { class: `marks ${name}` })]);
    this.svg.append(...this.bars.map(([, bar]) => bar));
  }

  add(mark, text) {
    this.marks.push(mark);
    if (this.marks.length > MOST_POINTS) this.marks.shift();
    this.say(text);
    this.show();
  }

  show() {
    const step = WIDTH / MOST_POINTS;
    const left = WIDTH - this.marks.length * step;
    for (const [name, bar] of this.bars) {
      const d = this.marks.map((mark, k) => (mark === name ? `M${(left + (k + 0.5) * step).toFixed(1)} 20v${HEIGHT - 40}` : ""));
      bar.setAttribute("d", d.join(""));
    }
  }

  clear() {
    this.marks = [];
    this.show();
    this.say("–");
  }
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
