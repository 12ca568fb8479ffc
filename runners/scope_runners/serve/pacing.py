"""A chunk is begun as late as it dares: what a person asks for waits behind as little as possible.

Pure: times come in as numbers, in seconds of one clock, and nothing here waits.
"""

from collections import deque
from dataclasses import dataclass

_NUM_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRules:
    """How careful the pace is."""

    lead_chunks: float = 1.0
    """Media that may lie finished and unshown when the next chunk is begun, in chunks."""
    safety: float = 1.5
    """The slowest chunk of late, times this, is expected of the next one."""
    slack_s: float = 0.05


class Pace:
    """When the chunks of one stream are begun, by how long those before took.

    A chunk is outstanding from its grant to its arrival.
    """

    def __init__(self, rules: PaceRules, *, max_outstanding: int) -> None:
        self._rules, self._max_outstanding = rules, max_outstanding
        self._granted_s: deque[float] = deque()
        self._taken_s: deque[float] = deque(maxlen=_NUM_KEPT)
        """Seconds from grant to arrival."""
        self._busy_s: deque[float] = deque(maxlen=_NUM_KEPT)
        """Seconds from grant, or from the arrival before, to arrival: what one chunk costs."""
        self._last_arrival_s = float("-inf")

    @property
    def num_outstanding(self) -> int:
        """Chunks that were granted and have not arrived."""
        return len(self._granted_s)

    @property
    def is_ahead(self) -> bool:
        """Whether more chunks are outstanding than the pace itself grants."""
        return self.num_outstanding > self._max_outstanding

    @property
    def expected_s(self) -> float:
        """How long the next chunk may take; 0 before the first has arrived."""
        if not self._taken_s:
            return 0.0
        return max(self._taken_s) * self._rules.safety + self._rules.slack_s

    @property
    def chunk_s(self) -> float:
        """What a chunk costs while others are made beside it; 0 before the first has arrived."""
        return max(self._busy_s, default=0.0)

    def grant_in_s(self, media_left_s: float, *, chunk_media_s: float) -> float | None:
        """Seconds until the next chunk may be begun, 0 for now; None before another arrives.

        `media_left_s` is finished and unshown, `chunk_media_s` what one chunk shows.
        """
        if self.num_outstanding >= self._max_outstanding:
            return None
        # Where nothing is shown and nothing outstanding, there is nothing to wait for.
        ahead_s = media_left_s + self.num_outstanding * chunk_media_s
        until_late_s = ahead_s - self.expected_s if self._taken_s else ahead_s
        until_lead_s = media_left_s - self._rules.lead_chunks * chunk_media_s
        return max(0.0, until_late_s, until_lead_s)

    def granted(self, now_s: float) -> None:
        """The next chunk may be begun."""
        self._granted_s.append(now_s)

    def arrived(self, now_s: float, *, num_outstanding: int) -> None:
        """A chunk has come, and so many that were granted have not: one that a hard cut dropped
        never comes, and one after it may come ungranted."""
        granted_s = None
        while len(self._granted_s) > num_outstanding:
            granted_s = self._granted_s.popleft()
        if granted_s is not None:
            self._taken_s.append(now_s - granted_s)
            self._busy_s.append(now_s - max(granted_s, self._last_arrival_s))
        self._last_arrival_s = now_s

    def reset(self) -> None:
        """Nothing is outstanding any more: the ranks start again, and may be slower at first."""
        self._granted_s.clear()
        self._last_arrival_s = float("-inf")
