"""What travels between the ranks of one group: tensors from one to another, and small gathers.

A lost peer or an expired wait leaves here as a `LinkError` that names what was waited for; nothing
is retried or swallowed.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from scope_contracts.errors import ContractError, mismatch
from scope_rt.mesh.authentic import SEAL_BYTES, FrameSeals, GatherSeals, Key
from scope_rt.mesh.failures import Liveness
from scope_rt.mesh.group import Group
from scope_rt.tensors import of_bytes

EXCHANGE_BYTES = 4096
"""Bytes that one rank sends in an `Exchange`: the length of what it says, that, and its proof."""
_LENGTH_BYTES = 4


class Exchange:
    """Small payloads to every rank of a group: one all_gather of `EXCHANGE_BYTES` per rank."""

    def __init__(self, group: Group, liveness: Liveness, seals: GatherSeals) -> None:
        self._group, self._liveness, self._seals = group, liveness, seals

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in the order of the group.

        Raises:
            ContractError: the payload is too long; nothing was sent.
            AuthenticationError: what arrived is not what a rank of this stream said.
            LinkError: a rank was lost.
        """
        most = EXCHANGE_BYTES - _LENGTH_BYTES - SEAL_BYTES
        if len(payload) > most:
            raise ContractError(mismatch("payload", got=len(payload), want=f"at most {most} bytes"))
        sealed = self._seals.seal(payload)
        length = len(sealed).to_bytes(_LENGTH_BYTES, "little")
        frame = (length + sealed).ljust(EXCHANGE_BYTES, b"\0")
        mine = of_bytes(frame)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group()))]
        with self._liveness.named_failures("exchange in the generator group"):
            dist.all_gather(parts, mine, group=self._group())
        frames = [part.numpy().tobytes() for part in parts]
        ends = [int.from_bytes(each[:_LENGTH_BYTES], "little") + _LENGTH_BYTES for each in frames]
        return self._seals.opened(
            [each[_LENGTH_BYTES:end] for each, end in zip(frames, ends, strict=True)]
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A send under way: the tensor must live, unchanged, until it is finished."""

    tensor: Tensor
    handle: dist.Work
    peer: int


class Transfers:
    """Bounded tensor transfers between the ranks of one gloo group; ranks are world ranks."""

    def __init__(
        self,
        group: Group,
        liveness: Liveness,
        *,
        key: Key,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        """`timeout_s` bounds every transfer, `patience_s` the wait for a message to begin.

        `key` is of this group and start alone.
        """
        self._group, self._liveness, self._key = group, liveness, key
        self._seals: dict[int, FrameSeals] = {}
        self._timeout, self._patience = timedelta(seconds=timeout_s), timedelta(seconds=patience_s)

    def seals(self, peer: int) -> FrameSeals:
        """Of the messages between this rank and another one, always the same: they are counted
        over all streams of a session."""
        if peer not in self._seals:
            self._seals[peer] = FrameSeals(self._key, rank=dist.get_rank(), peer=peer)
        return self._seals[peer]

    def send(self, tensor: Tensor, *, to: int) -> Work:
        """Start a send."""
        with self._liveness.named_failures(f"send to rank {to}", peer=to):
            handle = dist.isend(tensor, to, group=self._group())
        assert handle is not None, "this rank is not in the group"
        return Work(tensor, handle, to)

    def finish(self, work: Work) -> None:
        """Return when the send is done, or raise the LinkError that ended it."""
        with self._liveness.named_failures(f"send to rank {work.peer}", peer=work.peer):
            work.handle.wait(self._timeout)

    def receive(self, tensor: Tensor, *, source: int, begins: bool) -> None:
        """Fill `tensor` from `source`; `begins` says that nothing of its message came before."""
        with self._liveness.named_failures(f"receive from rank {source}", peer=source):
            handle = dist.irecv(tensor, source, group=self._group())
            assert handle is not None, "this rank is not in the group"
            handle.wait(self._patience if begins else self._timeout)
