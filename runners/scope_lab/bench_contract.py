"""`scripts/bench_contract`: what do parity, digests, budget and stream log cost?

Two answers from one run. The parts: each is called once for every chunk of running streams, at a
moment when model and decoder have just emptied the caches, and its median is set against the median
chunk. The whole: streams with everything armed and recorded, and with everything disarmed, take
turns chunk by chunk; a second disarmed stream shows what two equal streams differ by. Only what can
be disarmed shows in the whole, and only what happens in the median chunk; digests are made in any
case. Integrity is off: `bench_integrity` measures that. A busy machine stretches a chunk more than
a part of it, so where a chunk's CPU time is less than its wall time, it counts.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from scope_contracts.errors import ScopeError
from scope_contracts.integrity import IntegrityLevel
from scope_lab.contract_chunk import PROMPT
from scope_lab.contract_parts import Kind, Moment, Part, contract_parts
from scope_lab.contract_ranks import RankCosts
from scope_rt.config import MeshConfig, StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.instruments import Instruments
from scope_rt.mesh.heartbeat import BEATS_PER_BOUND
from scope_rt.session import StreamSession
from scope_runners.arguments import positive
from scope_runners.break_it.detectors import Detector, checks_without
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED
from scope_runners.job import available_cores

BUDGET_SHARE = 0.01
ARMED, DISARMED, AGAIN = "armed and recorded", "disarmed", "disarmed, once more"
_ARMS = (ARMED, DISARMED, AGAIN)
_WARM_UP_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One part: microseconds a chunk, median and quartiles, and the share of a chunk's time."""

    name: str
    kind: Kind
    where: Moment
    microseconds: float
    lower: float
    upper: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much longer a stream's chunk takes than the disarmed one beside it, as a share of that:
    the median of each round, over the rounds.
    """

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractBenchmark:
    """What one run found. `chunk_ms` is generation and decoding of the median chunk, by the wall
    or by the CPU's clock, whichever says less.
    """

    cores: int
    threads: int
    digest_every: int
    rounds: int
    chunks: int
    chunk_ms: float
    costs: tuple[Cost, ...]
    share: float
    """Of the parts that have a budget."""
    share_queued: float
    """The same, records counted until they are queued."""
    share_always: float
    """Of these and of all others that every stream pays for."""
    whole: Slowdown
    """In CPU time."""
    noise: Slowdown
    """Of a stream that differs in nothing."""

    @property
    def is_above_noise(self) -> bool:
        widest = max(abs(self.noise.lowest), abs(self.noise.highest))
        return abs(self.whole.median) > widest

    @property
    def holds(self) -> bool:
        return self.share < BUDGET_SHARE


def measure(*, rounds: int, num_chunks: int, threads: int) -> ContractBenchmark:
    """Measure the embedded model in `rounds` of `num_chunks` chunks for each stream.

    Raises:
        ScopeError: two ranks could not be measured, or the stream's log broke off.
    """
    torch.set_num_threads(threads)
    config = StreamConfig.of(integrity=IntegrityLevel.OFF)  # bench_integrity measures that
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = RankCosts.measured(folder)
        with contract_parts(config, folder=folder) as parts:
            bench = _Bench(parts, _sessions(config, folder / "armed.scope"))
            for _ in range(rounds):
                bench.round(num_chunks)
            bench.close()
    cpu_s = [seconds for each in bench.arm_s[DISARMED] for seconds in each]
    chunk_s = min(statistics.median(bench.chunk_s), statistics.median(cpu_s))
    costs = [
        *_two_rank_costs(ranks, config.mesh, chunk_s),
        *(
            _cost(part.name, part.kind, part.moment, seconds, chunk_s)
            for part, seconds in zip(parts, bench.part_s, strict=True)
        ),
    ]
    kinds, moments = list(Kind), list(Moment)
    costs.sort(key=lambda cost: (kinds.index(cost.kind), moments.index(cost.where)))
    return ContractBenchmark(
        cores=available_cores(),
        threads=threads,
        digest_every=config.mesh.digest_every,
        rounds=rounds,
        chunks=num_chunks,
        chunk_ms=chunk_s * 1e3,
        costs=tuple(costs),
        share=_share(costs, Kind.BUDGETED, Kind.WRITTEN),
        share_queued=_share(costs, Kind.BUDGETED),
        share_always=_share(costs, Kind.BUDGETED, Kind.WRITTEN, Kind.ALWAYS),
        whole=_slowdown(bench.arm_s[ARMED], bench.arm_s[DISARMED]),
        noise=_slowdown(bench.arm_s[AGAIN], bench.arm_s[DISARMED]),
    )


def _share(costs: Sequence[Cost], *kinds: Kind) -> float:
    return sum(cost.share for cost in costs if cost.kind in kinds)


def _two_rank_costs(ranks: RankCosts, mesh: MeshConfig, chunk_s: float) -> list[Cost]:
    """Every rank pays these."""
    every = mesh.digest_every
    beat_s = ranks.beat_s * chunk_s * BEATS_PER_BOUND / mesh.heartbeat_timeout_s
    beat = ("heartbeat, CPU time", Kind.ALWAYS)
    return [
        _cost(
            f"comparison, every {every} chunks",
            Kind.BUDGETED,
            Moment.RUN,
            [ranks.compare_s / every],
            chunk_s,
        ),
        _cost(*beat, Moment.PLANNED, [beat_s], chunk_s),
        _cost(*beat, Moment.RUN, [beat_s], chunk_s),
    ]


def _sessions(config: StreamConfig, log: Path) -> dict[str, StreamSession]:
    disarmed = Instruments(checks=checks_without(Detector))
    return {
        ARMED: StreamSession(config.with_settings(log=log, record_latents=True)),
        DISARMED: StreamSession(config, instruments=disarmed),
        AGAIN: StreamSession(config, instruments=disarmed),
    }


class _Bench:
    """Streams and parts, measured in turn."""

    def __init__(self, parts: Sequence[Part], sessions: dict[str, StreamSession]) -> None:
        self._parts, self._sessions = parts, sessions
        self._streams: dict[str, Iterator[Chunk]] = {
            name: session.stream(PROMPT) for name, session in sessions.items()
        }
        self.arm_s: dict[str, list[list[float]]] = {name: [] for name in _ARMS}
        """CPU seconds of every chunk, by round."""
        self.part_s: list[list[float]] = [[] for _ in parts]
        self.chunk_s: list[float] = []
        for stream in self._streams.values():
            for _ in range(_WARM_UP_CHUNKS):
                next(stream)

    def round(self, num_chunks: int) -> None:
        for rounds in self.arm_s.values():
            rounds.append([])
        for number in range(num_chunks):
            first = number % len(_ARMS)
            turns = (*_ARMS[first:], *_ARMS[:first])
            for name, moment in zip(turns, Moment, strict=True):
                start_s = time.process_time()
                chunk = next(self._streams[name])
                _ = self._sessions[name].log.offset  # what its log's thread writes is its own
                self.arm_s[name][-1].append(time.process_time() - start_s)
                self.chunk_s.append((chunk.stage_ms["generate"] + chunk.stage_ms["decode"]) / 1e3)
                self._time_parts(moment)

    def _time_parts(self, moment: Moment) -> None:
        for part, seconds in zip(self._parts, self.part_s, strict=True):
            if part.moment is moment:
                without_s = 0.0 if part.without is None else _elapsed_s(part.without, part.clock)
                seconds.append(_elapsed_s(part.work, part.clock) - without_s)

    def close(self) -> None:
        """Raises ScopeError if the armed stream was not logged to its end."""
        failure = self._sessions[ARMED].log.failure
        for session in self._sessions.values():
            session.close()
        if failure is not None:
            raise ScopeError(failure)


def _elapsed_s(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start_s = clock()
    work()
    return clock() - start_s


def _cost(name: str, kind: Kind, where: Moment, seconds: Sequence[float], chunk_s: float) -> Cost:
    median_s = statistics.median(seconds)
    spread = [1e6 * s for s in seconds] * (2 if len(seconds) == 1 else 1)
    lower, _, upper = statistics.quantiles(spread, n=4, method="inclusive")
    return Cost(
        name=name,
        kind=kind,
        where=where,
        microseconds=1e6 * median_s,
        lower=lower,
        upper=upper,
        share=median_s / chunk_s,
    )


def _slowdown(stream: Sequence[Sequence[float]], disarmed: Sequence[Sequence[float]]) -> Slowdown:
    shares = [
        statistics.median(a / b - 1 for a, b in zip(each, beside, strict=True))
        for each, beside in zip(stream, disarmed, strict=True)
    ]
    return Slowdown(median=statistics.median(shares), lowest=min(shares), highest=max(shares))


def table(result: ContractBenchmark) -> str:
    """Two markdown tables, for a person at a terminal."""
    row = "| {:<20} | {:<28} | {:>8} | {:>12} | {:>10} |".format
    lines = [
        f"Median chunk {result.chunk_ms:.1f} ms (generation and decoding); {result.cores} cores, "
        f"{result.threads} threads; {result.rounds} rounds of {result.chunks} chunks a stream.",
        "",
        row("where", "part", "µs/chunk", "quartiles", "of a chunk"),
        f"|{'-' * 22}|{'-' * 30}|{'-' * 9}:|{'-' * 13}:|{'-' * 11}:|",
    ]
    budget = f"budget {BUDGET_SHARE:.0%} {'holds' if result.holds else 'EXCEEDED'}"
    lines += _cost_rows(row, result, Kind.BUDGETED)
    lines.append(row("**sum until queued**", "", "", "", f"{result.share_queued:.3%}"))
    lines += _cost_rows(row, result, Kind.WRITTEN)
    lines.append(row("**sum**", budget, "", "", f"{result.share:.3%}"))
    lines += _cost_rows(row, result, Kind.ALWAYS)
    lines.append(row("**sum of all**", "no budget", "", "", f"{result.share_always:.3%}"))
    lines += _cost_rows(row, result, Kind.BETWEEN_RANKS)
    lines += _cost_rows(row, result, Kind.ON_REQUEST)
    row = "| {:<48} | {:>9} | {:>9} | {:>9} |".format
    lines += [
        "",
        row("a whole stream against a disarmed one, CPU time", "median", "lowest", "highest"),
        f"|{'-' * 50}|{'-' * 10}:|{'-' * 10}:|{'-' * 10}:|",
    ]
    for name, slowdown in ((ARMED, result.whole), (AGAIN, result.noise)):
        shares = (slowdown.median, slowdown.lowest, slowdown.highest)
        lines.append(row(name, *(f"{share:+.2%}" for share in shares)))
    above = "above" if result.is_above_noise else "within"
    lines += ["", f"The difference of the whole is {above} what two equal streams differ by."]
    return "\n".join(lines)


def _cost_rows(row: Callable[..., str], result: ContractBenchmark, kind: Kind) -> list[str]:
    return [
        row(
            cost.where if kind in (Kind.BUDGETED, Kind.ALWAYS) else kind.value,
            cost.name,
            f"{cost.microseconds:.0f}",
            f"{cost.lower:.0f} to {cost.upper:.0f}",
            f"{cost.share:.3%}",
        )
        for cost in result.costs
        if cost.kind is kind
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print; 1 if the contract costs more than its budget."""
    parser = CommandParser(
        prog="scripts/lab bench_contract",
        description="What parity, digests, call budget and stream log cost a stream.",
        epilog=f"Exit code: 0 if they cost below {BUDGET_SHARE:.0%} of a chunk's time, 1 if above.",
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--chunks", type=positive, default=64, help="of each stream in a round")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    result = measure(rounds=options.rounds, num_chunks=options.chunks, threads=options.threads)
    if options.json:
        verdicts = {"holds": result.holds, "is_above_noise": result.is_above_noise}
        print(json.dumps(asdict(result) | verdicts, indent=2))
    else:
        print(table(result))
    return 0 if result.holds else FAILED
