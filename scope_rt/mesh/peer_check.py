"""Generator ranks that differ, or slow each other down, are detected before the next collective.

Every N chunks each rank tells the others, in one small gather, the scalars of the chunk it is about
to run, where its cache stands, its numeric settings and how long it computed. After every chunk
they compare what all of them must have computed alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from scope_contracts.integrity import suspect_from
from scope_contracts.parity import ScalarDigest
from scope_contracts.wire import CanonicalMessage
from scope_rt.checks import Checks
from scope_rt.integrity.evidence import RankEvidence, decode_evidence, encode_evidence

NUM_REMEMBERED = 16
"""Chunks whose times a rank is measured by."""
FEWEST_REMEMBERED = 3
"""Fewer are not compared: the first chunk after a start warms up, and any one may be an outlier."""
_OF_ONE_RANK = "threads="
"""A host may have more cores than another; its number of threads must only stay what it is."""
_LENGTH_BYTES = 4
_PIECE_BYTES = 4000
"""Of evidence that one gather takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport(CanonicalMessage):
    """What a generator rank tells the others before a chunk; `busy_ms` is what a chunk takes it,
    0 while that is not known."""

    digest: ScalarDigest
    busy_ms: float
    numerics: tuple[str, ...] = ()
    """Those numeric settings that change results."""


@dataclass(slots=True, kw_only=True)
class PeerCheck:
    """One generator rank's part in the comparison; `ranks` are world ranks, in group order.

    `gather` gives every rank's bytes in that order; None for a group of one. `waited_s` tells how
    long this rank has waited in collectives so far.
    """

    ranks: Sequence[int]
    rank: int
    every: int
    gather: Callable[[bytes], list[bytes]] | None
    waited_s: Callable[[], float]
    slow_factor: float = 0.0
    numerics: Callable[[], tuple[str, ...]] = tuple
    """This process's numeric settings, where they are watched."""
    generator_settings: Callable[[], tuple[str, ...]] = tuple
    """Likewise; ranks compared them when they met."""
    checks: Checks = field(default_factory=Checks)
    _num_chunks: int = 0
    _waited_before_s: float = 0.0
    _busy_ms: list[float] = field(default_factory=list)
    _settings_at_start: tuple[str, ...] | None = None

    def before(self, chunk: int, digest: Callable[[], ScalarDigest]) -> None:
        """Compare, if it is due, what the ranks are about to run: only then `digest` is asked for.

        Settings are looked at then, and `after` every chunk: what changes them for a chunk changes
        them until its end.

        Raises:
            ParityError: naming the scalar or the numeric setting, both values and both ranks.
            IntegrityError: settings of this process or its generator changed.
            SlowRankError: naming the rank.
            FieldError, WireError: a rank's report cannot be read.
        """
        due = self._num_chunks % self.every == 0
        self._num_chunks += 1
        self._waited_before_s = self.waited_s()
        if not due:
            return
        self._check_settings(chunk)
        if self.gather is None:
            return
        shared = tuple(each for each in self.numerics() if not each.startswith(_OF_ONE_RANK))
        mine = PeerReport(digest=digest(), busy_ms=self._usual_ms(), numerics=shared)
        reports = [PeerReport.decode(data) for data in self.gather(mine.encode())]
        self.checks.scalars([report.digest for report in reports], self.ranks)
        self.checks.same_numerics([report.numerics for report in reports], self.ranks)
        self._check_pace(chunk, [report.busy_ms for report in reports])

    def after(self, chunk: int, elapsed_ms: float, evidence: RankEvidence | None) -> None:
        """Note how long this rank computed; alone, it is measured against its own past.

        Where there is `evidence`, it is compared with that of the others: one gather, and one more
        for each further 4 KB of it.

        Raises:
            LinkError: a rank was lost.
            IntegrityError: ranks computed different results, an all-reduce gave another sum than
                that of its parts, or the fixed chunk changed; naming the rank where that is known.
            SlowRankError: this rank became far slower.
            FieldError, WireError: a rank's evidence cannot be read.
        """
        self._check_settings(chunk)  # else it would be the next chunk that accuses this one
        if evidence is not None:
            self._compare(chunk, evidence)
        busy_ms = elapsed_ms - (self.waited_s() - self._waited_before_s) * 1e3
        if self.gather is None and self.slow_factor > 0:
            usual_ms = self._usual_ms()
            self._check_pace(chunk, [max(busy_ms, usual_ms), usual_ms])
        self._busy_ms = [*self._busy_ms[1 - NUM_REMEMBERED :], busy_ms]

    def _check_settings(self, chunk: int) -> None:
        """This process's numeric settings and its generator's are still those of its start."""
        now = (*self.numerics(), *self.generator_settings())
        self._settings_at_start = self._settings_at_start or now
        if now != self._settings_at_start:
            with suspect_from(chunk):
                self.checks.numerics(self.rank, chunk, now=now, at_start=self._settings_at_start)

    def _compare(self, chunk: int, mine: RankEvidence) -> None:
        given = [mine]
        if self.gather is not None:
            given = [
                decode_evidence(data) for data in _gathered(self.gather, encode_evidence(mine))
            ]
        with suspect_from(chunk):
            self.checks.replicated(chunk, [each.result for each in given], self.ranks)
        if mine.sums:
            with suspect_from(mine.sums_from):
                self.checks.reduced_sums(chunk, [each.sums for each in given], self.ranks)
        if mine.canary:
            digests = [each.canary for each in given]
            with suspect_from(mine.canary_from):
                self.checks.canary(chunk, digests, self.ranks, mine.expected_canary)

    def _usual_ms(self) -> float:
        """What a chunk takes here; 0 is not known yet."""
        return median(self._busy_ms) if len(self._busy_ms) >= FEWEST_REMEMBERED else 0.0

    def _check_pace(self, chunk: int, busy_ms: Sequence[float]) -> None:
        if self.slow_factor > 0:
            self.checks.pace(chunk, busy_ms, self.ranks, self.slow_factor)


def _gathered(gather: Callable[[bytes], list[bytes]], data: bytes) -> list[bytes]:
    """Every rank's `data`, of any length, in as many gathers as the longest takes."""
    pieces = gather(len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_PIECE_BYTES])
    lengths = [int.from_bytes(piece[:_LENGTH_BYTES], "little") for piece in pieces]
    whole = [piece[_LENGTH_BYTES:] for piece in pieces]
    for start in range(_PIECE_BYTES, max(lengths), _PIECE_BYTES):
        pieces = gather(data[start : start + _PIECE_BYTES])
        whole = [before + piece for before, piece in zip(whole, pieces, strict=True)]
    return whole
