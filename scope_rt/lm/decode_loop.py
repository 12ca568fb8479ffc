"""Many requests to several models share one pool of blocks, and every one of them gets its answer.

Requests start in the order in which they came: the oldest that waits starts first, nobody passes
it, whatever its specialist. In every step each running request advances once, by one chunk of its
prompt or by one token, so none waits for another's end. Where the pool is full, the newest running
request gives its blocks back and waits again, before all that came later; what it had is computed
anew, or found if its blocks were not taken. The oldest request is never preempted and fits the
pool, or it was refused; so it ends, and by induction all do.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_rt.lm.cache.backend_policy import check_dense_bound
from scope_rt.lm.cache.block_key import BlockKey, SharingScope
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedSequence, PagedStore
from scope_rt.lm.requests import Completion, LoopCounters, Request, Specialist
from scope_rt.lm.step import next_logits


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way: `tokens` are its prompt and its answer so far."""

    request: Request
    scope: SharingScope
    tokens: list[int]
    sequence: PagedSequence
    tokens_reused: int | None = None
    preemptions: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    """Of the full blocks of `tokens`, as far as they were asked for: tokens only ever join."""

    @property
    def pending(self) -> int:
        """Tokens whose rows are not cached; the last of them gives the next one."""
        return len(self.tokens) - self.sequence.length

    @property
    def is_done(self) -> bool:
        answer = self.tokens[len(self.request.prompt) :]
        full = len(answer) == self.request.max_new_tokens
        return full or (bool(answer) and answer[-1] in self.request.stop_tokens)


class DecodeLoop:
    """Continuous batching (Yu et al., 2022) over the blocks of `store`.

    Args:
        max_running: requests that hold blocks at once, over all specialists.
        max_waiting: requests that may wait; one more is refused.
        prefill_chunk: tokens of a prompt that one step computes at most.

    Raises:
        UserInputError: a size below 1, two specialists of one name, or one that writes other rows
            than the store's.
    """

    def __init__(
        self,
        specialists: Iterable[Specialist],
        store: PagedStore,
        *,
        max_running: int = 64,
        max_waiting: int = 1024,
        prefill_chunk: int = 512,
    ) -> None:
        sizes = {
            "max_running": max_running,
            "max_waiting": max_waiting,
            "prefill_chunk": prefill_chunk,
        }
        for name, size in sizes.items():
            if size < 1:
                raise UserInputError(mismatch(name, got=size, want="at least 1"))
        self.specialists: dict[str, Specialist] = {}
        for specialist in specialists:
            _check(specialist, store, self.specialists)
            self.specialists[specialist.name] = specialist
        self.store, self.counters = store, LoopCounters()
        self.max_running, self.max_waiting = max_running, max_waiting
        self.prefill_chunk = prefill_chunk
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        """Oldest first; each is older than all that wait."""

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserInputError: it can never be answered: nothing asked, no integers, an unknown
                specialist or token, or more than the pool, the model or dense attention takes.
            CacheError: too many wait already; nothing was changed.
        """
        request = request.normalised()
        specialist = self._fitting(request)
        if len(self._waiting) >= self.max_waiting:
            raise CacheError(
                f"{request.name}: {self.max_waiting} requests wait already; submit it again after "
                "a step, or raise max_waiting"
            )
        scope = SharingScope(
            domain=specialist.name, lora_revision=specialist.lora_revision, salt=request.salt
        )
        self._waiting.append(_Job(request, scope, list(request.prompt), self.store.start()))

    @property
    def num_unanswered(self) -> int:
        return len(self._waiting) + len(self._running)

    def run(self) -> list[Completion]:
        """Step until every request is answered; answers come in order of their ends."""
        answers: list[Completion] = []
        while self.num_unanswered:
            answers += self.step()
        return answers

    def step(self) -> list[Completion]:
        """Advance every running request once. Returns those that this ended."""
        self._admit()
        ended: list[_Job] = []
        for specialist in self.specialists.values():
            own = [job for job in self._running if job.request.specialist == specialist.name]
            prefills = [job for job in own if job.pending > 1]
            decodes = [job for job in own if job.pending == 1]
            for job in prefills:
                ended += self._forward(specialist, [job])
            ended += self._forward(specialist, decodes)
        return [_completion(job) for job in ended]

    def _fitting(self, request: Request) -> Specialist:
        """Who answers `request`; raises `UserInputError` where nobody ever can."""
        specialist = self.specialists.get(request.specialist)
        if specialist is None:
            have = ", ".join(self.specialists)
            raise UserInputError(mismatch("specialist", got=request.specialist, want=have))
        if not request.prompt or request.max_new_tokens < 1:
            got = f"{len(request.prompt)} prompt and {request.max_new_tokens} new tokens"
            raise UserInputError(mismatch(request.name, got=got, want="at least 1 of each"))
        if not 0 <= min(request.prompt) <= max(request.prompt) < specialist.vocab_size:
            got = f"tokens from {min(request.prompt)} to {max(request.prompt)}"
            want = f"0 to {specialist.vocab_size - 1}"
            raise UserInputError(mismatch(request.name, got=got, want=want))
        most = len(request.prompt) + request.max_new_tokens - 1  # the last one is never fed back
        self._check_room(request.name, specialist, most)
        return specialist

    def _check_room(self, name: str, specialist: Specialist, most: int) -> None:
        """Refuse what a step would refuse, for a step would stop all requests with it."""
        limits = {
            "max_tokens of the cache": self.store.max_tokens,
            f"max_position_embeddings of {specialist.name}": specialist.max_tokens,
        }
        for what, limit in limits.items():
            if limit is not None and most > limit:
                raise UserInputError(f"{name} feeds {most} tokens, {what} is {limit}; shorten it")
        need, pool = self.store.most_blocks(most, at_once=self.prefill_chunk), self.store.pool
        if need > pool.num_blocks:
            raise UserInputError(
                f"{name} needs {need} blocks for {most} tokens and the pool has "
                f"{pool.num_blocks}; shorten it, or raise the cache's byte budget"
            )
        at_once = max(min(self.prefill_chunk, most), self.max_running)
        try:  # one chunk of a prompt, or one token of everybody
            check_dense_bound(batch=1, heads=specialist.num_heads, queries=at_once, num_rows=most)
        except CacheError as error:
            sizes = f"prefill_chunk {self.prefill_chunk}, max_running {self.max_running}"
            raise UserInputError(f"{name}: {error} ({sizes})") from None

    def _admit(self) -> None:
        """Start requests, oldest first, while all their tokens find room beside the others'."""
        while self._waiting and len(self._running) < self.max_running:
            job, pool = self._waiting[0], self.store.pool
            match = self.store.prefixes.match(self._keys(job), len(job.tokens))
            need = self._most_blocks(job) - len(match.blocks)
            promised = sum(
                max(0, self._most_blocks(other) - len(other.sequence.blocks))
                for other in self._running
            )
            if need + promised > pool.num_free - pool.num_idle(match.blocks):
                return
            job.sequence = self.store.start(match)
            self.counters.tokens_reused += job.sequence.length
            if job.tokens_reused is None:
                job.tokens_reused = job.sequence.length
            self._running.append(self._waiting.popleft())

    def _keys(self, job: _Job) -> list[BlockKey]:
        job.keys = self.store.keys(job.tokens, job.scope, job.keys)
        return job.keys

    def _most_blocks(self, job: _Job) -> int:
        return self.store.most_blocks(len(job.tokens), at_once=self.prefill_chunk)

    def _forward(self, specialist: Specialist, jobs: Sequence[_Job]) -> list[_Job]:
        """Compute the next chunk, or the next token, of each of `jobs` that keeps its blocks.

        Returns those that this ended; their blocks are free.
        """
        jobs = self._with_room([job for job in jobs if job in self._running])
        if not jobs:
            return []
        feeds = [job.tokens[job.sequence.length :][: self.prefill_chunk] for job in jobs]
        cache = PagedCache(self.store, [job.sequence for job in jobs])
        logits = next_logits(specialist.model, specialist.rows, cache, feeds)
        self._count(jobs, feeds)
        for job, token in zip(jobs, logits.argmax(-1).tolist(), strict=True):
            self.store.publish(job.sequence, self._keys(job))
            if not job.pending:
                job.tokens.append(token)
        ended = [job for job in jobs if job.is_done]
        for job in ended:
            self._running.remove(job)
            self.store.end(job.sequence)
        return ended

    def _count(self, jobs: Sequence[_Job], feeds: Sequence[Sequence[int]]) -> None:
        """Count a forward that is done, token by token: a feed may hold the end of a prompt."""
        self.counters.forwards += 1
        for job, feed in zip(jobs, feeds, strict=True):
            answered = max(0, job.sequence.length - len(job.request.prompt))
            decoded = min(len(feed), answered)
            self.counters.tokens_decoded += decoded
            self.counters.tokens_prefilled += len(feed) - decoded

    def _with_room(self, jobs: list[_Job]) -> list[_Job]:
        """Those of `jobs` that are left once the newest requests made room for them."""
        while jobs:
            growths = [
                self.store.plan_growth(job.sequence, min(job.pending, self.prefill_chunk))
                for job in jobs
            ]
            if self.store.fits(growths):
                break
            victim = self._running.pop()
            self.store.end(victim.sequence)
            victim.preemptions += 1
            self.counters.preemptions += 1
            self._waiting.appendleft(victim)
            jobs = [job for job in jobs if job is not victim]
        return jobs


def _check(specialist: Specialist, store: PagedStore, others: dict[str, Specialist]) -> None:
    """Refuse a specialist that cannot live in `store` beside `others`."""
    if specialist.name in others:
        raise UserInputError(f"two specialists are called {specialist.name}; rename one")
    rows = specialist.rows
    windows = tuple(
        next(group.window for group in store.groups if slot in group.slots)
        for slot in range(store.layers.num_slots)
    )
    own = (rows.row_format, rows.layers, rows.windows)
    if own != (store.rows.format, store.layers, windows):
        raise UserInputError(
            f"{specialist.name} writes {rows.row_format} in {rows.layers.num_layers} layers and "
            f"the pool holds {store.rows.format} in {store.layers.num_layers}; give specialists of "
            "another shape a pool of their own"
        )


def _completion(job: _Job) -> Completion:
    return Completion(
        request=job.request,
        tokens=tuple(job.tokens[len(job.request.prompt) :]),
        tokens_reused=job.tokens_reused or 0,
        preemptions=job.preemptions,
    )
