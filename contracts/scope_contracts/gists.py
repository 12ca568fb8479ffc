"""Which summaries of older frames a chunk sees follows from where it ends; their number is bounded.

Frames that left the window are counted from the first one that is no sink. A gist of level 1 pools
`group` consecutive frames, one of level n + 1 pools `group` gists of level n. Each level shows
`group` gists; behind the oldest of them the next level takes over; the last level forgets. No frame
is left out between two levels, so the newest gist of a level may also cover what the level before
still shows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GistPlan:
    """No levels, no gists."""

    group: int
    num_levels: int

    @property
    def num_slots(self) -> int:
        """Gists of all levels that are kept: the bound."""
        return self.group * self.num_levels

    def in_view(self, num_left: int) -> tuple[range, ...]:
        """Gists of every level that are seen when `num_left` frames have left the window.

        The newest of level 1 begins with a frame that has left; its last ones may still be there.
        """
        shown, behind = [], num_left
        for _ in range(self.num_levels):
            end = -(-behind // self.group)
            behind = max(0, end - self.group)
            shown.append(range(behind, end))
        return tuple(shown)
