"""The first thing on a new group: each two of its ranks prove to each other who they are.

Backends find each other through addresses in the store that nobody seals, and take whoever connects
first. So each rank of a group sends every other one a proof for this group, this start and these
two ranks, over the very connections that messages will take, before anything else.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from scope_contracts.errors import AuthenticationError
from scope_rt.mesh.authentic import SEAL_BYTES, Key
from scope_rt.mesh.failures import Liveness
from scope_rt.mesh.group import Group
from scope_rt.tensors import of_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proving:
    """One group's part of the handshake; `key` is of this group and this start alone."""

    group: Group
    ranks: Sequence[int]
    key: Key


def prove_each_other(
    groups: Sequence[Proving], rank: int, *, liveness: Liveness, timeout: timedelta
) -> None:
    """Return when `rank` knows that the other ranks of all `groups` are at the other ends.

    All proofs are on their way before the first is awaited, each for `timeout` at most: so no rank
    waits for what another one waits for.

    Raises:
        AuthenticationError: naming the rank in whose place another process is.
        LinkError: a rank was lost, or what is in its place says nothing.
    """
    pending = []
    for each in groups:
        for peer in (peer for peer in each.ranks if peer != rank):
            proof = torch.empty(SEAL_BYTES, dtype=torch.uint8)
            mine = of_bytes(each.key.proof(f"{rank} to {peer}"))
            with liveness.named_failures(f"proving rank {peer}", peer=peer):
                receive = dist.irecv(proof, peer, group=each.group())
                send = dist.isend(mine, peer, group=each.group())
            pending.append((each.key, peer, proof, receive, mine, send))
    for key, peer, proof, receive, _, send in pending:
        assert receive is not None, "this rank is in the group"
        assert send is not None, "this rank is in the group"
        with liveness.named_failures(f"proving rank {peer}", peer=peer):
            receive.wait(timeout)
            send.wait(timeout)
        if not hmac.compare_digest(proof.numpy().tobytes(), key.proof(f"{peer} to {rank}")):
            raise AuthenticationError(
                f"proving rank {peer}: what connected in its place does not know this stream's "
                "secret; nothing was sent to it"
            )
