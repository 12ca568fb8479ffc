"""What an edit saves follows from how much of the context it dirties and how cost grows with depth.

Computing T leaves costs `linear * T + quadratic * T**2`; with the quadratic share
`b = quadratic * T / (linear + quadratic * T)`, an edit that leaves a fraction f of the leaves dirty
costs `(1 - b) * f + b * (1 - (1 - f)**2)` of a full recompute. Windows bound the keys of a leaf and
make b small; full attention makes it large.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.lm.hierarchical.hierarchy import Span

LEAST_GAIN = 1.25
"""Below this predicted gain a full recompute is preferred: it is simpler and about as fast."""


def speed_up(dirty_fraction: float, quadratic_share: float) -> float:
    """Predicted time of a full recompute over that of an edit."""
    f, b = dirty_fraction, quadratic_share
    cost = (1 - b) * f + b * (1 - (1 - f) ** 2)
    return 1 / cost if cost else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one leaf at depth t: `linear + 2 * quadratic * t`."""

    linear: float
    quadratic: float

    def quadratic_share(self, num_leaves: int) -> float:
        """b at a context of `num_leaves`."""
        bent = self.quadratic * num_leaves
        return bent / (self.linear + bent)

    def seconds(self, span: Span) -> float:
        """Of computing the leaves of a span: the sum of their costs."""
        bent = self.quadratic * (span.end**2 - span.start**2)
        return self.linear * span.num_leaves + bent

    def gain(self, computed: Iterable[Span], *, num_leaves: int) -> float:
        """Predicted speed-up over a full recompute of an edit that computes these spans.

        For one span at the end it is `speed_up`. Rows that are copied back count as free.
        """
        if not num_leaves:
            return 1.0
        cost = sum(map(self.seconds, computed))
        return self.seconds(Span(start=0, end=num_leaves)) / cost if cost else float("inf")


FLAT = CostModel(linear=1.0, quadratic=0.0)
"""Every leaf costs the same, as with windows: what is assumed until something was measured."""


def fitted(depths: Sequence[float], seconds_per_leaf: Sequence[float]) -> CostModel:
    """The cost model of measured chunks: depth of the middle of a chunk, and its time by leaf.

    The slope is the median of the slopes of all pairs (Theil 1950, Sen 1968), so that a few chunks
    that were disturbed do not count. A slope below 0 is noise and counts as 0.

    Raises:
        UserInputError: fewer than two depths were measured.
    """
    points = list(zip(depths, seconds_per_leaf, strict=True))
    slopes = [
        (later - earlier) / (deeper - depth)
        for number, (depth, earlier) in enumerate(points)
        for deeper, later in points[number + 1 :]
        if deeper != depth
    ]
    if not slopes:
        got = len(set(depths))
        raise UserInputError(mismatch("measured depths", got=got, want="at least 2"))
    slope = max(0.0, median(slopes))
    linear = median(seconds - slope * depth for depth, seconds in points)
    if linear <= 0:
        slope = median(seconds / depth for depth, seconds in points if depth)
        return CostModel(linear=0.0, quadratic=slope / 2)
    return CostModel(linear=linear, quadratic=slope / 2)
