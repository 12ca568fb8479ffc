"""Control input is coalesced, latest wins, and takes effect at a chunk boundary.

Whoever posts gets a receipt, and every receipt is answered once: with the chunk at which the input
took effect, or with the reason why it never will. What nobody takes does not grow: all that is
posted between two takes is one directive with one outcome.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from scope_contracts.errors import ScopeError
from scope_rt.control.transition import TransitionSpec
from scope_rt.tensors import sha256_of

MOST_COMMANDS = 256
"""With an id, that one chunk takes: its record in the log names them all."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A prompt and its embeddings `[B, text_len, text_dim]`, with their digest since they were
    made."""

    prompt: str
    embeds: Tensor
    embeds_sha256: str = ""

    def __post_init__(self) -> None:
        if not self.embeds_sha256:
            object.__setattr__(self, "embeds_sha256", sha256_of(self.embeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What a person asked for between two chunks."""

    conditioning: Conditioning | None = None
    transition: TransitionSpec | None = None
    """How this prompt comes in; None is at once. Means nothing without one."""
    hard_cut: bool = False
    drop_in_flight: bool = False
    """Whether chunks of the old epoch that are under way are dropped, or shown first."""
    recompute: bool = False
    """Whether the cache is rebuilt from context before this chunk."""
    bias: float | None = None
    """The resting `kv_cache_attention_bias` from here on; None leaves it."""
    seed: int | None = None
    """The base seed from here on; None leaves it."""
    command_ids: tuple[str, ...] = ()
    """Of the commands that asked for this, in order."""

    def then(self, later: "Directive") -> "Directive":
        """Both as one; of two prompts, biases or seeds the later wins, a prompt with its
        transition; all else is kept."""
        newest = self if later.conditioning is None else later
        return Directive(
            conditioning=newest.conditioning,
            transition=newest.transition,
            hard_cut=self.hard_cut or later.hard_cut,
            drop_in_flight=self.drop_in_flight or later.drop_in_flight,
            recompute=self.recompute or later.recompute,
            bias=self.bias if later.bias is None else later.bias,
            seed=self.seed if later.seed is None else later.seed,
            command_ids=self.command_ids + later.command_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledDirective:
    """A directive for one chunk index, so that every plan makes the same video of it."""

    chunk_index: int
    directive: Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The chunk at which what was posted took effect.

    `superseded`: a later prompt, bias or seed took this one's place before any chunk was planned
    with it, and `chunk_index` is where that one took effect. A cut posted with it happened even
    then.
    """

    chunk_index: int
    cache_epoch: int
    superseded: bool


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many prompts, biases and seeds were posted; of one post, its own numbers, 0 for none."""

    prompts: int = 0
    biases: int = 0
    seeds: int = 0

    def of(self, directive: Directive) -> "_Counts":
        """The numbers of a post of `directive`, the one after these."""
        return _Counts(
            0 if directive.conditioning is None else self.prompts + 1,
            0 if directive.bias is None else self.biases + 1,
            0 if directive.seed is None else self.seeds + 1,
        )

    def after(self, posted: "_Counts") -> "_Counts":
        return _Counts(
            posted.prompts or self.prompts, posted.biases or self.biases, posted.seeds or self.seeds
        )

    def is_superseded_in(self, all_posted: "_Counts") -> bool:
        """Whether a later post took the place of any of these."""
        return (
            0 < self.prompts < all_posted.prompts
            or 0 < self.biases < all_posted.biases
            or 0 < self.seeds < all_posted.seeds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    chunk_index: int
    cache_epoch: int
    posted: _Counts


_Outcome = Future[_Effect | Exception]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receipt:
    """What a post is answered with. Any thread may wait, any number of times."""

    _outcome: _Outcome
    _posted: _Counts

    def wait(self, timeout_s: float) -> Ack | None:
        """Where it took effect; None if that is not known within `timeout_s`.

        Raises:
            ScopeError: it never takes effect: planning failed, which is the cause of this error,
                or the stream ended first.
        """
        try:
            outcome = self._outcome.result(timeout_s)
        except TimeoutError:
            return None
        if isinstance(outcome, Exception):
            raise ScopeError(f"control input did not take effect: {outcome}") from outcome
        return Ack(
            chunk_index=outcome.chunk_index,
            cache_epoch=outcome.cache_epoch,
            superseded=self._posted.is_superseded_in(outcome.posted),
        )

    def when_answered(self, call: Callable[[], None]) -> None:
        """Have `call` run once `wait` would return at once: here where it is, else on the thread
        that answers, which it must not block."""
        self._outcome.add_done_callback(lambda _: call())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """What one chunk is planned with, to be answered before the next take. One answer counts."""

    directive: Directive
    _outcome: _Outcome
    _posted: _Counts

    def acknowledge(self, chunk_index: int, cache_epoch: int) -> None:
        """It took effect at this chunk."""
        self._answer(
            _Effect(
                chunk_index=chunk_index,
                cache_epoch=cache_epoch,
                posted=self._posted,
            )
        )

    def refuse(self, error: Exception) -> None:
        """No chunk was planned with it, because of `error`; whoever waits is told."""
        self._answer(error)

    def _answer(self, outcome: _Effect | Exception) -> None:
        # Another thread may close the inbox meanwhile: the first answer stands.
        with suppress(InvalidStateError):
            self._outcome.set_result(outcome)


class ControlInbox:
    """Where any thread leaves directives, and the loop takes them once a chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = Directive()
        self._outcome = _Outcome()
        self._posted = _Counts()
        self._last_taken: Taken | None = None
        self._schedule: dict[int, Directive] = {}
        self._scheduled: tuple[ScheduledDirective, ...] | None = ()
        """`_schedule` in order, None where that must be made anew; it is asked for every chunk."""
        self._closed_because: str | None = None

    def post(self, directive: Directive) -> Receipt:
        """Ask for something at the next chunk that is planned.

        Raises:
            ScopeError: the inbox is closed, or holds as many commands as one chunk may take.
        """
        with self._lock:
            if self._closed_because is not None:
                raise ScopeError(
                    f"control input was posted too late: {self._closed_because}; start a new stream"
                )
            if len(self._pending.command_ids) >= MOST_COMMANDS:
                raise ScopeError(
                    f"{MOST_COMMANDS} commands wait for the next chunk; post this one again once "
                    "they are answered"
                )
            self._pending = self._pending.then(directive)
            posted = self._posted.of(directive)
            self._posted = self._posted.after(posted)
            return Receipt(_outcome=self._outcome, _posted=posted)

    def schedule(self, events: Iterable[ScheduledDirective]) -> None:
        """Ask for something at chunks that are still to come, instead of what was asked before."""
        with self._lock:
            self._schedule.clear()
            self._scheduled = None
            for event in events:
                planned = self._schedule.get(event.chunk_index, Directive())
                self._schedule[event.chunk_index] = planned.then(event.directive)

    def scheduled(self) -> tuple[ScheduledDirective, ...]:
        """What is still to come, in order: given to `schedule`, it is the same schedule again."""
        with self._lock:
            if self._scheduled is None:
                self._scheduled = tuple(
                    ScheduledDirective(chunk_index=index, directive=directive)
                    for index, directive in sorted(self._schedule.items(), key=lambda item: item[0])
                )
            return self._scheduled

    def take(self, chunk_index: int, *, unless: Callable[[Directive], bool]) -> Taken | None:
        """Everything asked for up to the planning of `chunk_index`; a post wins over a schedule.

        Where `unless` says so of it, all of it stays and None is returned.
        """
        with self._lock:
            due = sorted(index for index in self._schedule if index <= chunk_index)
            scheduled = Directive()
            for index in due:
                scheduled = scheduled.then(self._schedule[index])
            if unless(scheduled.then(self._pending)):
                return None
            for index in due:
                del self._schedule[index]
                self._scheduled = None
            return self._take_posted(scheduled)

    def close(self, reason: str = "the stream has ended") -> None:
        """Take no more posts, and answer everyone who still waits with `reason`. Idempotent."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = reason
            self._take_posted(Directive()).refuse(ScopeError(self._closed_because))

    def _take_posted(self, scheduled: Directive) -> Taken:
        """Empty what was posted into one answer to give; an earlier one is overdue by now."""
        if self._last_taken is not None:
            self._last_taken.refuse(ScopeError(self._closed_because or "its chunk was not planned"))
        self._last_taken = Taken(
            directive=scheduled.then(self._pending),
            _outcome=self._outcome,
            _posted=self._posted,
        )
        self._pending, self._outcome = Directive(), _Outcome()
        return self._last_taken
