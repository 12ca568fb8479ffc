"""A message is header, then its canonical bytes, then its tensors: in that order, never less.

The header is two int64: a magic number and the length of the bytes. The bytes hold the specs of the
tensors that follow, so a receiver allocates exactly what was announced. Tensors travel through CPU
memory: a chunk of latents is about a megabyte, not worth a second transport.
"""

from collections import deque
from collections.abc import Callable, Mapping
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


def _receive(
    fill: Callable[[Tensor], None], decode: Callable[[bytes], M]
) -> tuple[M, dict[str, Tensor]]:
    """Read one message; `fill` returns when its tensor has arrived.

    Raises:
        ContractError: the header or the bytes are not a message of this protocol.
        LinkError: the peer is gone or silent.
    """
    header = torch.empty(2, dtype=torch.int64)
    fill(header)
    magic, length = (int(number) for number in header)
    if magic != MAGIC or not 0 < length <= MAX_MESSAGE_BYTES:
        raise WireError(
            f"header: got magic {magic:#x} and {length} bytes, want magic {MAGIC:#x} and at most "
            f"{MAX_MESSAGE_BYTES} bytes; install the same package on every rank"
        )
    body = torch.empty(length, dtype=torch.uint8)
    fill(body)
    message = decode(body.numpy().tobytes())
    tensors = {spec.name: empty(spec) for spec in message.tensors}
    for tensor in tensors.values():
        fill(tensor)
    return message, tensors


class PeerLink:
    """Messages between rank0 and a leader. A send is started now and finished before the next one
    but one, so that two ranks that both have something to say never wait for each other.
    """

    def __init__(self, transfers: Transfers, *, peer: int) -> None:
        self._transfers, self._peer = transfers, peer
        self._outbox: deque[list[Work]] = deque()

    def send(self, message: PPEnvelope | PPResult, tensors: Tensors) -> None:
        while len(self._outbox) > 1:
            self._finish_oldest()
        frames = _frames(message, tensors)
        self._outbox.append([self._transfers.send(frame, to=self._peer) for frame in frames])

    def receive_envelope(self) -> tuple[PPEnvelope, dict[str, Tensor]]:
        return _receive(self._fill, decode_envelope)

    def receive_result(self) -> tuple[PPResult, dict[str, Tensor]]:
        return _receive(self._fill, decode_result)

    def flush(self) -> None:
        """Return when everything sent has left."""
        while self._outbox:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work in self._outbox.popleft():
            self._transfers.finish(work)

    def _fill(self, tensor: Tensor) -> None:
        self._transfers.receive(tensor, source=self._peer)


class GroupLink:
    """Messages from a generator group's leader to all its ranks."""

    def __init__(self, transfers: Transfers, *, leader: int) -> None:
        self._transfers, self._leader = transfers, leader

    def send(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        for frame in _frames(envelope, tensors):
            self._fill(frame)

    def receive(self) -> tuple[PPEnvelope, dict[str, Tensor]]:
        return _receive(self._fill, decode_envelope)

    def _fill(self, tensor: Tensor) -> None:
        self._transfers.broadcast(tensor, root=self._leader)
