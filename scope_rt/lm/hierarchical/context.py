"""A working context is a value: leaves that partition time, each a token or a gist of many.

A gist leaf of level k stands for `group**k` tokens, aligned to as many. Positions are those of the
tokens in time, so an edit moves no node that it does not replace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch


@dataclass(frozen=True, slots=True)
class Expand:
    """The gist leaf that begins at time `start` becomes its `group` children."""

    start: int


@dataclass(frozen=True, slots=True)
class Collapse:
    """The leaves that cover `group**level` tokens from time `start` on become one gist leaf."""

    start: int
    level: int = 1


@dataclass(frozen=True, slots=True)
class Replace:
    """The tokens from time `start` on are other ones."""

    start: int
    tokens: tuple[int, ...]


Edit = Expand | Collapse | Replace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkingContext:
    """`tokens` `[time]`; of every leaf its first time step and its level `[leaves]`; all int64."""

    group: int
    tokens: Tensor
    starts: Tensor
    levels: Tensor

    @classmethod
    def of(cls, tokens: Iterable[int] | Tensor, *, group: int) -> "WorkingContext":
        """All tokens as leaves.

        Raises:
            UserInputError: a token is negative or no 64-bit number.
        """
        time = tokens.long() if isinstance(tokens, Tensor) else _checked(list(tokens))
        starts = torch.arange(time.numel())
        return cls(group=group, tokens=time, starts=starts, levels=torch.zeros_like(starts))

    @property
    def num_leaves(self) -> int:
        return self.starts.numel()

    @property
    def spans(self) -> Tensor:
        """Time steps that every leaf stands for, int64 `[leaves]`."""
        return self.group**self.levels

    def times(self, first: int, end: int, *, leaves_per_node: int) -> tuple[Tensor, Tensor]:
        """`(t_center, sigma)` of nodes `first .. end - 1`, float64 `[nodes]`, in time steps.

        sigma is the standard deviation of the time steps that a node covers: 0 for a token.
        """
        starts = self.starts[first * leaves_per_node : end * leaves_per_node : leaves_per_node]
        lasts = slice((first + 1) * leaves_per_node - 1, end * leaves_per_node, leaves_per_node)
        widths = (self.starts[lasts] + self.spans[lasts] - starts).double()
        return starts + (widths - 1) / 2, ((widths**2 - 1) / 12).sqrt()

    def appended(self, tokens: Sequence[int]) -> "WorkingContext":
        """The context with these tokens as leaves at its end."""
        new = WorkingContext.of(tokens, group=self.group)
        return replace(
            self,
            tokens=torch.cat([self.tokens, new.tokens]),
            starts=torch.cat([self.starts, new.starts + self.tokens.numel()]),
            levels=torch.cat([self.levels, new.levels]),
        )

    def edited(self, edits: Iterable[Edit]) -> "WorkingContext":
        """The context after all edits, in their order.

        A batch is one step from the old leaves to the new: spans that overlap, or that undo each
        other, cost what is different in the end.

        Raises:
            UserInputError: an edit does not fit the leaves it finds; nothing was changed.
        """
        context = self
        for edit in edits:
            match edit:
                case Expand():
                    context = context._expanded(edit)
                case Collapse():
                    context = context._collapsed(edit)
                case Replace():
                    context = context._replaced(edit)
        return context

    def common_prefix(self, other: "WorkingContext") -> int:
        """Leaves at the beginning that both contexts have, of equal time, level and tokens."""
        leaves = min(self.num_leaves, other.num_leaves)
        same = (self.starts[:leaves] == other.starts[:leaves]) & (
            self.levels[:leaves] == other.levels[:leaves]
        )
        prefix = _leading_true(same)
        time = min(self.tokens.numel(), other.tokens.numel())
        first_changed = _leading_true(self.tokens[:time] == other.tokens[:time])
        if first_changed < time:
            prefix = min(prefix, self._leaf_at(first_changed))
        return prefix

    def changed_leaves(self, old: "WorkingContext") -> Tensor:
        """Leaves of this context that `old` does not have, int64, ascending."""
        at = torch.searchsorted(old.starts, self.starts).clamp(max=max(old.num_leaves - 1, 0))
        if not old.num_leaves:
            return torch.arange(self.num_leaves)
        same = (old.starts[at] == self.starts) & (old.levels[at] == self.levels)
        time = min(self.tokens.numel(), old.tokens.numel())
        changes = torch.zeros(self.tokens.numel() + 1, dtype=torch.int64)
        changes[1 : time + 1] = (self.tokens[:time] != old.tokens[:time]).cumsum(0)
        changes[time + 1 :] = changes[time]
        same &= changes[self.starts + self.spans] == changes[self.starts]
        return (~same).nonzero().flatten()

    def _leaf_at(self, time: int) -> int:
        return int(torch.searchsorted(self.starts, time, right=True)) - 1

    def _expanded(self, edit: Expand) -> "WorkingContext":
        leaf = self._leaf_at(edit.start) if 0 <= edit.start < self.tokens.numel() else -1
        if leaf < 0 or self.starts[leaf] != edit.start or self.levels[leaf] == 0:
            raise UserInputError(
                f"expand: no gist leaf begins at time {edit.start}; expand what was collapsed"
            )
        level = int(self.levels[leaf]) - 1
        starts = edit.start + torch.arange(self.group) * self.group**level
        return self._with_leaves(leaf, leaf + 1, starts, level)

    def _collapsed(self, edit: Collapse) -> "WorkingContext":
        num_tokens = self.tokens.numel()
        if not 0 < edit.level <= num_tokens.bit_length():
            want = f"from 1 on, and so small that {self.group}**level fits {num_tokens} tokens"
            raise UserInputError(mismatch("collapse: level", got=edit.level, want=want))
        span = self.group**edit.level
        end = edit.start + span
        fits = edit.start >= 0 and edit.start % span == 0 and end <= num_tokens
        first, last = (self._leaf_at(time) if fits else 0 for time in (edit.start, end))
        fits = fits and int(self.starts[first]) == edit.start
        fits = fits and (end == num_tokens or int(self.starts[last]) == end)
        if not fits or int(self.levels[first]) >= edit.level:
            raise UserInputError(
                f"collapse: no leaves below level {edit.level} tile the {span} tokens from "
                f"{edit.start} to {end} of {num_tokens}; start at a multiple of {span}"
            )
        stop = self.num_leaves if end == num_tokens else last
        return self._with_leaves(first, stop, torch.tensor([edit.start]), edit.level)

    def _replaced(self, edit: Replace) -> "WorkingContext":
        end = edit.start + len(edit.tokens)
        if edit.start < 0 or end > self.tokens.numel():
            raise UserInputError(
                f"replace: tokens {edit.start}..{end - 1} of {self.tokens.numel()}; append new ones"
            )
        tokens = self.tokens.clone()
        tokens[edit.start : end] = _checked(edit.tokens)
        return replace(self, tokens=tokens)

    def _with_leaves(self, first: int, end: int, starts: Tensor, level: int) -> "WorkingContext":
        levels = torch.full_like(starts, level)
        return replace(
            self,
            starts=torch.cat([self.starts[:first], starts, self.starts[end:]]),
            levels=torch.cat([self.levels[:first], levels, self.levels[end:]]),
        )


def _checked(tokens: Sequence[int]) -> Tensor:
    """Tokens from Python, int64."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < 2**63:
        got = min(tokens) if min(tokens) < 0 else max(tokens)
        raise UserInputError(mismatch("token", got=got, want="a number from 0 on, below 2**63"))
    return torch.tensor(tokens, dtype=torch.int64)


def _leading_true(flags: Tensor) -> int:
    """How many flags are true before the first false one."""
    wrong = (~flags).nonzero()
    return int(wrong[0]) if wrong.numel() else flags.numel()
