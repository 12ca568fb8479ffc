"""What the contract does for one chunk, part by part, as calls that can be timed alone.

What rank0 and a generator rank both do is listed for both, as if nothing overlapped. A part knows
its moment, since each of them finds the processor's caches full of pictures and weights. What
verifies numbers and what ranks hold is no part of it: `bench_integrity` measures that.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.answer import check_answer, check_state
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import LATENTS_OUT, STATE_DIGEST, PPEnvelope, PPResult
from scope_contracts.parity import ScalarDigest, state_hash
from scope_contracts.preflight import preflight
from scope_lab.contract_chunk import SteadyChunk
from scope_rt.config import StreamConfig
from scope_rt.control.log_entries import finished_record, planned_record
from scope_rt.control.resume_point import ResumePoint
from scope_rt.mesh.authentic import FrameSeals, Key
from scope_rt.mesh.link import PeerLink
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.transfers import Transfers, Work
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.stream_log import StreamLog
from scope_rt.tensors import bytes_of, sha256_of, specs_by_name

_NEVER = 2**31
_NUMBERS = count(1000)


class Moment(StrEnum):
    """When and where a part of the contract has its turn."""

    PLANNED = "rank0, planning"
    RUN = "generator rank"
    ARRIVED = "rank0, on arrival"


class Kind(StrEnum):
    """What a part is for."""

    BUDGETED = "parity, digests, budget, stream log"
    """These together have a budget, with `WRITTEN`."""
    WRITTEN = "the log's own thread"
    """A stream waits for none of it; its CPU time counts."""
    ALWAYS = "and envelope checks, heartbeat"
    """Every stream pays for these too."""
    BETWEEN_RANKS = "between ranks"
    """Streams of one process do not pay for these."""
    ON_REQUEST = "on request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`work` happens once a chunk; what `without` takes is not its cost."""

    name: str
    moment: Moment
    kind: Kind = Kind.BUDGETED
    work: Callable[[], object]
    without: Callable[[], object] | None = None
    clock: Callable[[], float] = time.perf_counter
    """By which `work` is timed, in seconds."""


@contextmanager
def contract_parts(config: StreamConfig, *, folder: Path) -> Iterator[list[Part]]:
    """The parts of a stream of `config`, in the order of their turns; `folder` is for files."""
    steady = SteadyChunk.of(config, folder)
    with closing(StreamLog(folder / "parts.scope", record_latents=True)) as log:
        log.append(steady.opened)
        yield [
            *_planned(steady, log),
            *_run(steady),
            *_peer_check(steady),
            *_arrived(steady, log, folder),
        ]


def _planned(steady: SteadyChunk, log: StreamLog) -> list[Part]:
    envelope, lifecycle = steady.envelope, steady.lifecycle
    moment, calls = Moment.PLANNED, envelope.expected_generator_calls

    def check() -> None:
        preflight(_next(envelope), specs_by_name(steady.tensors), steady.setup.geometry)

    return [
        Part(
            name="preflight",
            moment=moment,
            kind=Kind.ALWAYS,
            work=check,
            without=lambda: _next(envelope),
        ),
        Part(
            name="lifecycle",
            moment=moment,
            kind=Kind.ALWAYS,
            work=lambda: lifecycle.enter(envelope).commit(calls),
        ),
        _logged("stream log, envelope", moment, lambda: log.append(planned_record(envelope))),
        Part(name="state digest", moment=moment, work=lambda: _digest(steady)),
    ]


def _next(envelope: PPEnvelope) -> PPEnvelope:
    """As the envelope of another chunk, with its own numbers; it is not encoded yet."""
    number = next(_NUMBERS)
    return replace(envelope, call_id=number, chunk_index=number, current_start_frame=3 * number)


def _run(steady: SteadyChunk) -> list[Part]:
    envelope, lifecycle = steady.envelope, steady.lifecycle
    moment, calls = Moment.RUN, envelope.expected_generator_calls

    def check() -> None:
        announced = {spec.name: spec for spec in envelope.tensors}
        preflight(envelope, announced, steady.setup.geometry)

    def live() -> None:
        lifecycle.enter(envelope)  # to admit it, and again to run it
        lifecycle.enter(envelope).commit(calls)

    def spend() -> None:
        budget = CallBudget(envelope.chunk_index, calls)
        for _ in range(calls):
            budget.enter()

    return [
        Part(name="preflight", moment=moment, kind=Kind.ALWAYS, work=check),
        Part(name="lifecycle", moment=moment, kind=Kind.ALWAYS, work=live),
        Part(name="call budget", moment=moment, work=spend),
        Part(
            name="state digest",
            moment=moment,
            work=lambda: state_hash(_next(envelope), steady.indices),
            without=lambda: _next(envelope),
        ),
        Part(
            name="SHA-256 of the latents",
            moment=moment,
            work=lambda: sha256_of(steady.answer[LATENTS_OUT]),
        ),
    ]


def _peer_check(steady: SteadyChunk) -> list[Part]:
    """A chunk in which no comparison is due."""
    check = PeerCheck(
        ranks=(0,),
        rank=0,
        every=_NEVER,
        gather=None,
        waited_s=lambda: 0.0,
    )

    def look() -> None:
        chunk = steady.envelope.chunk_index
        check.before(chunk, lambda: ScalarDigest.of(steady.envelope, steady.indices))
        check.after(chunk, 1.0, None)

    look()  # the first chunk is always due
    return [
        Part(name="peer check where none is due", moment=Moment.RUN, work=look),
    ]


def _arrived(steady: SteadyChunk, log: StreamLog, folder: Path) -> list[Part]:
    snapshot = SnapshotStore(folder / "parts.snapshot")
    moment, planned = Moment.ARRIVED, _digest(steady)

    def check() -> None:
        check_answer(steady.envelope, steady.result)
        ran = steady.answer[STATE_DIGEST].numpy().tobytes()
        check_state(steady.envelope, ran=ran, planned=planned)

    def keep() -> None:
        latents = bytes(bytes_of(steady.chunk.latents))
        log.append(finished_record(steady.chunk, with_latents=True), latents)

    return [
        Part(name="answer and state digest", moment=moment, work=check),
        _logged("stream log, latents", moment, keep),
        Part(  # once a chunk, as in a stream: the envelope waits for it
            name="stream log, both written",
            moment=moment,
            kind=Kind.WRITTEN,
            work=log.flush,
            clock=time.process_time,
        ),
        Part(
            name="snapshot",
            moment=moment,
            kind=Kind.ON_REQUEST,
            work=lambda: snapshot.save(steady.header, _next_point(steady)),
            without=lambda: _next_point(steady),
        ),
        Part(
            name="keyed digests of a link",
            moment=moment,
            kind=Kind.BETWEEN_RANKS,
            work=lambda: _converse(steady, with_digests=True),
            without=lambda: _converse(steady, with_digests=False),
        ),
    ]


def _logged(name: str, moment: Moment, work: Callable[[], None]) -> Part:
    """A record is encoded by who appends it, and written later by another thread."""
    return Part(name=name, moment=moment, work=work, clock=time.process_time)


def _next_point(steady: SteadyChunk) -> ResumePoint:
    """With new latents of the last chunk: those that were saved before are not written again."""
    point = steady.resume_point
    *before, last = point.tail.chunks
    chunks = (*before, replace(last, latents=torch.randn_like(last.latents)))
    return replace(point, tail=replace(point.tail, chunks=chunks))


def _digest(steady: SteadyChunk) -> bytes:
    return state_hash(steady.envelope, steady.indices)


class _Loopback(Transfers):
    """What is sent is received here, in order."""

    def __init__(self) -> None:
        self._under_way: deque[Tensor] = deque()
        self._seals = {0: FrameSeals(Key.of(None), rank=0, peer=0)}

    def send(self, tensor: Tensor, *, to: int) -> Work:
        self._under_way.append(tensor)
        return None  # type: ignore[return-value]

    def finish(self, work: Work) -> None: ...

    def receive(self, tensor: Tensor, *, source: int, begins: bool) -> None:
        tensor.copy_(self._under_way.popleft())


def _converse(steady: SteadyChunk, *, with_digests: bool) -> None:
    """One envelope there and one result back."""
    link = PeerLink(_Loopback(), peer=0, with_digests=with_digests)
    link.send(steady.envelope, steady.tensors)
    link.receive_envelope(_admit)
    link.send(steady.result, steady.answer)
    link.receive_result(_admit)


def _admit(message: PPEnvelope | PPResult) -> None: ...
