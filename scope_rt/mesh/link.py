"""A message is header, then its canonical bytes, then its tensors: in that order, never less.

The header is three int64: a magic number, the length of the bytes, and whether digests follow. The
bytes hold the specs of the tensors, so a receiver allocates exactly what was announced. With
digests, a last frame holds one for the bytes and one for each tensor, and what arrived is compared
before it is used. They are keyed by the stream's secret, the sender, the receiver and the number of
the message: nobody on the way can alter a message, nor send one again. Tensors travel through CPU
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
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.mesh.authentic import DIGEST_BYTES
from scope_rt.mesh.transfers import Transfers, Work
from scope_rt.tensors import bytes_of, empty, of_bytes

MAGIC = 0x5C09E02
Tensors = Mapping[str, Tensor]
Derive = Callable[[PPEnvelope, Tensors], dict[str, Tensor]]
M = TypeVar("M", PPEnvelope, PPResult)


def nothing(message: PPEnvelope | PPResult) -> frozenset[str]:
    """All tensors travel."""
    return frozenset()


class PeerLink:
    """Messages between two ranks. A send is started now and finished before the next one but one,
    so that two ranks that both have something to say never wait for each other.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        peer: int,
        with_digests: bool = True,
        derived_of: Callable[[PPEnvelope | PPResult], frozenset[str]] = nothing,
        derive: Derive | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        """Tensors that `derived_of` a message are announced and do not travel: the receiver's
        `derive` makes them."""
        self._derived_of, self._derive = derived_of, derive
        self._transfers, self._peer, self._with_digests = transfers, peer, with_digests
        self._instruments = instruments or Instruments()
        self._outbox: deque[list[Work]] = deque()

    def send(self, message: PPEnvelope | PPResult, tensors: Tensors) -> None:
        while len(self._outbox) > 1:
            self._finish_oldest()
        frames = self._frames(message, tensors)
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

    def _frames(self, message: PPEnvelope | PPResult, tensors: Tensors) -> list[Tensor]:
        """What travels, in order; all of it is built before the first frame leaves."""
        body = of_bytes(encode(message))
        payload = {
            spec.name: tensors[spec.name].detach().cpu().contiguous() for spec in message.tensors
        }
        digests = []
        if self._with_digests:
            parts = [bytes_of(body), *map(bytes_of, payload.values())]
            sent = self._transfers.seals(self._peer).sent(parts)
            digests.append(of_bytes(b"".join(sent)))
        derived = self._derived_of(message)
        travelling = [tensor for name, tensor in payload.items() if name not in derived]
        frames = self._instruments.faults.reach(
            FaultPoint.FRAMES, message.chunk_index, [body, *travelling]
        )
        header = torch.tensor([MAGIC, len(frames[0]), len(digests)])
        return [header, *frames, *digests]

    def _finish_oldest(self) -> None:
        for work in self._outbox.popleft():
            self._transfers.finish(work)

    def _receive(
        self, decode: Callable[[bytes], M], admit: Callable[[M], None]
    ) -> tuple[M, dict[str, Tensor]]:
        """Read one message; `admit` refuses one whose tensors must not be received.

        Raises:
            ContractError: the header or the bytes are not a message of this protocol.
            DigestError: it was altered on the way, or is not the peer's next one.
            LinkError: the peer is gone or silent.
        """
        header = torch.empty(3, dtype=torch.int64)
        self._fill(header, begins=True)
        magic, length, num_digests = (int(number) for number in header)
        if magic != MAGIC or not 0 < length <= MAX_MESSAGE_BYTES:
            raise WireError(
                f"header: got magic {magic:#x} and {length} bytes, want magic {MAGIC:#x} and at "
                f"most {MAX_MESSAGE_BYTES} bytes; install the same package on every rank"
            )
        if num_digests != self._with_digests:
            raise WireError(
                f"header: got {num_digests} digest frames, want {int(self._with_digests)}; set "
                "SCOPE_TP_INPUT_DIGEST alike on every rank"
            )
        body = torch.empty(length, dtype=torch.uint8)
        self._fill(body)
        message = decode(body.numpy().tobytes())
        admit(message)
        derived = self._derived_of(message)
        tensors = {spec.name: empty(spec) for spec in message.tensors if spec.name not in derived}
        for tensor in tensors.values():
            self._fill(tensor)
        if self._derive is not None and isinstance(message, PPEnvelope):
            tensors = self._derive(message, tensors)
        if self._with_digests:
            self._check_digests(message, {"message": body, **tensors})
        return message, tensors

    def _check_digests(self, message: PPEnvelope | PPResult, arrived: Tensors) -> None:
        sent = torch.empty(len(arrived) * DIGEST_BYTES, dtype=torch.uint8)
        self._fill(sent)
        digests = self._transfers.seals(self._peer).arrived([*map(bytes_of, arrived.values())])
        self._instruments.checks.input_digests(
            f"chunk {message.chunk_index}",
            f"rank {self._peer}",
            sent={
                name: part.numpy().tobytes()
                for name, part in zip(arrived, sent.split(DIGEST_BYTES), strict=True)
            },
            arrived=dict(zip(arrived, digests, strict=True)),
        )

    def _fill(self, tensor: Tensor, *, begins: bool = False) -> None:
        self._transfers.receive(tensor, source=self._peer, begins=begins)


class GroupLink:
    """Messages from a generator group's leader to each of its other ranks."""

    def __init__(self, links: Sequence[PeerLink]) -> None:
        """`links` go from the leader to every follower, or from a follower to its leader."""
        self._links = links

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
