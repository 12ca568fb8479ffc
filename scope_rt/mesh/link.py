"""A message is header, then its canonical bytes, then its tensors: in that order, never less.

The header is two int64: a magic number and the length of the bytes. The bytes hold the specs of the
tensors that follow, so a receiver allocates exactly what was announced. Tensors travel through CPU
memory: a chunk of latents is about a megabyte, not worth a second transport.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scope_contracts.envelope import PPEnvelope, PPResult
from scope_contracts.errors import WireError
from scope_contracts.wire import MAX_MESSAGE_BYTES, decode_envelope, decode_result, encode
from scope_rt.mesh.process_group import Transfers, Work
from scope_rt.tensors import empty

MAGIC = 0x5C09E01
Tensors = Mapping[str, Tensor]
M = TypeVar("M", PPEnvelope, PPResult)


def _frames(message: PPEnvelope | PPResult, tensors: Tensors) -> list[Tensor]:
    """What travels, in order; all of it is built before the first frame leaves."""
    data = encode(message)
    header = torch.tensor([MAGIC, len(data)])
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    payload = [tensors[spec.name].detach().cpu().contiguous() for spec in message.tensors]
    return [header, body, *payload]


class PeerLink:
    """Messages between two ranks. A send is started now and finished before the next one but one,
    so that two ranks that both have something to say never wait for each other.
    """

    def __init__(self, transfers: Transfers, *, peer: int) -> None:
        self._transfers, self._peer = transfers, peer
        self._outbox: deque[list[Work]] = deque()

    def send(self, message: PPEnvelope | PPResult, tensors: Tensors) -> None:
        while len(self._outbox) > 1:
            self._finish_oldest()
        frames = _frames(message, tensors)
        self._outbox.append([self._transfers.send(frame, to=self._peer) for frame in frames])

    def receive_envelope(
        self, admit: Callable[[PPEnvelope], None]
    ) -> tuple[PPEnvelope, dict[str, Tensor]]:
        return self._receive(decode_envelope, admit)

    def receive_result(
        self, admit: Callable[[PPResult], None]
    ) -> tuple[PPResult, dict[str, Tensor]]:
        return self._receive(decode_result, admit)

    def flush(self) -> None:
        """Return when everything sent has left."""
        while self._outbox:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work in self._outbox.popleft():
            self._transfers.finish(work)

    def _receive(
        self, decode: Callable[[bytes], M], admit: Callable[[M], None]
    ) -> tuple[M, dict[str, Tensor]]:
        """Read one message; `admit` refuses one whose tensors must not be received.

        Raises:
            ContractError: the header or the bytes are not a message of this protocol.
            LinkError: the peer is gone or silent.
        """
        header = torch.empty(2, dtype=torch.int64)
        self._fill(header, begins=True)
        magic, length = (int(number) for number in header)
        if magic != MAGIC or not 0 < length <= MAX_MESSAGE_BYTES:
            raise WireError(
                f"header: got magic {magic:#x} and {length} bytes, want magic {MAGIC:#x} and at "
                f"most {MAX_MESSAGE_BYTES} bytes; install the same package on every rank"
            )
        body = torch.empty(length, dtype=torch.uint8)
        self._fill(body)
        message = decode(body.numpy().tobytes())
        admit(message)
        tensors = {spec.name: empty(spec) for spec in message.tensors}
        for tensor in tensors.values():
            self._fill(tensor)
        return message, tensors

    def _fill(self, tensor: Tensor, *, begins: bool = False) -> None:
        self._transfers.receive(tensor, source=self._peer, begins=begins)


class GroupLink:
    """Messages from a generator group's leader to each of its other ranks."""

    def __init__(self, transfers: Transfers, *, rank: int, ranks: Sequence[int]) -> None:
        leader, *followers = ranks
        peers = followers if rank == leader else [leader]
        self._links = [PeerLink(transfers, peer=peer) for peer in peers]

    def send(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        for link in self._links:
            link.send(envelope, tensors)

    def receive(self, admit: Callable[[PPEnvelope], None]) -> tuple[PPEnvelope, dict[str, Tensor]]:
        (leader,) = self._links
        return leader.receive_envelope(admit)

    def flush(self) -> None:
        """Return when everything sent has left."""
        for link in self._links:
            link.flush()
