/** Invariant: every figure shown is one the server sent; what it did not send is a dash, never a zero. */
import { LineChart, MarkChart, number, StageChart } from "./charts.js";
import { byId, bytes, make, seconds, setText } from "./dom.js";

const known = (value) => value !== null && value !== undefined;

function percent(share) {
  return known(share) ? `${Math.round(share * 100)} %` : "–";
}

/** Counts with their causes; those of 0 are left out. */
function causes(counts) {
  if (!counts.some(([count]) => known(count))) return "–";
  return counts.filter(([count]) => count).map(([count, cause]) => `${count} ${cause}`).join(", ") || "none";
}

export class Measures {
  constructor() {
    this.rate = new LineChart("Frames per second", ["main"]);
    this.stages = new StageChart("Stages, p50 / p95 ms");
    this.latency = new LineChart("Prompt to picture", ["main", "second"], { floor: 100 });
    this.fill = new LineChart("KV cache", ["main"], { top: 1.05 });
    this.epoch = new LineChart("Epoch", ["main"], { floor: 2, stepped: true });
    this.drops = new LineChart("Frames dropped", ["main", "second", "third"], { floor: 4, stepped: true });
    this.parity = new MarkChart("Parity");
    this.deadline = new LineChart("Frames on time", ["main"], { top: 1.05 });
    this.charts = [this.rate, this.stages, this.latency, this.fill, this.epoch, this.drops, this.parity, this.deadline];
    byId("measures").append(...this.charts.map((chart) => chart.element));
  }

  /** One `Stats` of the server. */
  take(stats) {
    const { prompt_latency_ms: latency = {}, drops = {}, stage_ms: stages = {} } = stats;
    this.rate.add([stats.frames_per_s], known(stats.frames_per_s) ? `${number(stats.frames_per_s)}` : "–");
    this.stages.set({ ...stages, ...(stats.encode_ms && { encode: stats.encode_ms }) }, "");
    const measured = known(latency.p50) && latency.n !== 0;
    this.latency.add([latency.p50, latency.p95], measured ? `${seconds(latency.p50)}, p95 ${seconds(latency.p95)}` : "–");
    const size = known(stats.cache_bytes) ? `, ${bytes(stats.cache_bytes)}` : "";
    this.fill.add([stats.cache_fill], percent(stats.cache_fill) + size);
    this.epoch.add([stats.cache_epoch], known(stats.cache_epoch) ? `${stats.cache_epoch}` : "–");
    const { hard_cut: cut, slow_viewer: viewer, encoder } = drops;
    this.drops.add([cut, viewer, encoder], causes([[cut, "by cuts"], [viewer, "by viewers"], [encoder, "by encoder"]]));
    const told = { good: "good", bad: "bad" }[stats.parity] ?? "unknown";
    const lost = [[stats.recoveries, "recovered"], [stats.retracted_chunks, "retracted"]];
    this.parity.add(told, [told, ...lost.filter(([count]) => count).map(([count, name]) => `${count} ${name}`)].join(", "));
    this.deadline.add([stats.deadline_attainment], percent(stats.deadline_attainment));
  }

  /** The stream's own rate: the line to reach. */
  setGoal(fps) {
    this.rate.goal = fps;
  }

  clear() {
    for (const chart of this.charts) chart.clear();
  }
}

/** The ranks of a session and their states. */
export function showRanks(ranks) {
  byId("ranks-part").hidden = !ranks?.length;
  const list = byId("ranks");
  while (list.children.length > (ranks?.length ?? 0)) list.lastElementChild.remove();
  (ranks ?? []).forEach(({ rank, state, pid, detail }, k) => {
    const parts = ["dot", "rank", "rank-state"].map((className) => make("span", { className }));
    const line = list.children[k] ?? list.appendChild(make("li", {}, ...parts));
    line.dataset.state = state;
    line.title = [detail, pid ? `process ${pid}` : ""].filter(Boolean).join(", ");
    setText(line.children[1], rank === 0 ? "rank 0" : `rank ${rank}`);
    setText(line.children[2], state);
  });
}

/** The recordings of a session, each to download; one under way is named so. */
export function showRecordings(recordings, address) {
  byId("recordings-part").hidden = !recordings.length;
  const lines = recordings.toReversed().map(({ name, bytes: size, under_way: runs }) =>
    make("li", {}, make("a", { href: address(name), download: `${name}.mp4`, textContent: name }),
      make("span", { className: "quiet" }, runs ? "recording" : bytes(size))));
  byId("recordings").replaceChildren(...lines);
}
