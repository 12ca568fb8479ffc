"""What a rank said is taken once, unaltered, from that rank, in its place; or refused by name."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import AuthenticationError, DigestError, WireError
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.authentic import FrameSeals, GatherSeals, Key
from scope_rt.mesh.interface import are_on_one_host, is_loopback
from scope_rt.mesh.link import PeerLink
from scope_rt.mesh.transfers import Transfers, Work
from scope_rt.stream_secret import StreamSecret
from scope_rt.tensors import specs_of
from tests.tiny_models import envelope

KEY = Key.of(StreamSecret(b"a" * 32)).derive("link")
OTHER = Key.of(StreamSecret(b"b" * 32)).derive("link")


class Wire(Transfers):
    """One end of a wire that is in this process; `frames` is what is on its way to this end."""

    def __init__(self, rank: int, key: Key = KEY) -> None:
        self._own = {peer: FrameSeals(key, rank=rank, peer=peer) for peer in range(3)}
        self.frames: deque[Tensor] = deque()
        self.there: Wire | None = None

    def seals(self, peer: int) -> FrameSeals:
        return self._own[peer]

    def send(self, tensor: Tensor, *, to: int) -> Work:
        assert self.there is not None
        self.there.frames.append(tensor.clone())
        return None  # type: ignore[return-value]

    def finish(self, work: Work) -> None: ...

    def receive(self, tensor: Tensor, *, source: int, begins: bool) -> None:
        tensor.copy_(self.frames.popleft())


def wires(key: Key = KEY) -> tuple[Wire, Wire]:
    """Ranks 0 and 1; `key` is what rank 0 has."""
    zero, one = Wire(0, key), Wire(1)
    zero.there, one.there = one, zero
    return zero, one


TENSORS = {"latents_in": torch.arange(8.0), "context_frames_override": torch.ones(8)}
NUM_FRAMES = 5
"""Header, message, two tensors and their digests."""


def planned(chunk: int) -> PPEnvelope:
    return replace(envelope(chunk), tensors=specs_of(TENSORS))


def say(wire: Wire, chunk: int, *, to: int = 1) -> None:
    link = PeerLink(wire, peer=to)
    link.send(planned(chunk), TENSORS)
    link.flush()


def hear(wire: Wire, *, peer: int = 0) -> PPEnvelope:
    message, _ = PeerLink(wire, peer=peer).receive_envelope(lambda envelope: None)
    return message


def test_messages_arrive_in_the_order_they_were_sent_over_links_that_are_made_anew() -> None:
    zero, one = wires()
    for chunk in range(3):
        say(zero, chunk)
    assert [hear(one).chunk_index for _ in range(3)] == [0, 1, 2]


def alter_a_latent(frames: deque[Tensor]) -> None:
    frames[2][3] += 1


def alter_the_seed(frames: deque[Tensor]) -> None:
    """The last bit of a number in the message itself, which stays a whole message."""
    body = frames[1].numpy().tobytes()
    at = body.index(b"base_seed") + len(b"base_seed")
    frames[1][at] = 9


def alter_the_proof(frames: deque[Tensor]) -> None:
    frames[4][0] ^= 1


def say_the_first_again(frames: deque[Tensor]) -> None:
    first = [frames[i].clone() for i in range(NUM_FRAMES)]
    frames.extendleft(reversed(first))


def leave_the_first_out(frames: deque[Tensor]) -> None:
    for _ in range(NUM_FRAMES):
        frames.popleft()


def exchange_tensors_with_their_digests(frames: deque[Tensor]) -> None:
    """Each digest still is of the tensor that it comes with."""
    frames[2], frames[3] = frames[3], frames[2]
    message, first, second = frames[4].split(16)
    frames[4] = torch.cat([message, second, first])


@pytest.mark.parametrize(
    "alter",
    [
        alter_a_latent,
        alter_the_seed,
        alter_the_proof,
        say_the_first_again,
        leave_the_first_out,
        exchange_tensors_with_their_digests,
    ],
)
def test_a_message_that_was_altered_repeated_or_withheld_on_the_way_is_refused(
    alter: Callable[[deque[Tensor]], None],
) -> None:
    zero, one = wires()
    say(zero, 0)
    say(zero, 1)
    alter(one.frames)
    with pytest.raises(DigestError, match=r"^chunk [01]: (message|latents_in) from rank 0: "):
        for _ in range(2):
            hear(one)


def test_a_message_of_a_stranger_and_one_for_another_rank_are_refused() -> None:
    zero, one = wires(OTHER)
    say(zero, 0)
    with pytest.raises(DigestError, match=r"^chunk 0: message from rank 0"):
        hear(one)
    zero, one = wires()
    say(zero, 0, to=2)
    with pytest.raises(DigestError):
        hear(one)


def test_a_message_that_is_sent_back_to_its_sender_is_refused() -> None:
    zero, one = wires()
    say(zero, 0)
    zero.frames, one.frames = one.frames, zero.frames
    with pytest.raises(DigestError):
        hear(zero, peer=1)


def test_a_message_without_digests_is_refused_where_they_are_due() -> None:
    zero, one = wires()
    link = PeerLink(zero, peer=1, with_digests=False)
    link.send(planned(0), TENSORS)
    with pytest.raises(WireError, match="set SCOPE_TP_INPUT_DIGEST alike on every rank"):
        hear(one)


def test_what_ranks_say_in_a_gather_is_taken_in_that_gather_alone() -> None:
    zero, one = (GatherSeals(KEY, (0, 1), rank) for rank in (0, 1))
    first = [zero.seal(b"red"), one.seal(b"circle")]
    assert zero.opened(first) == one.opened(first) == [b"red", b"circle"]
    second = [zero.seal(b"blue"), one.seal(b"square")]
    for bad, named in (
        ([first[0], second[1]], 0),  # played back
        ([second[0], first[1]], 1),
        ([second[0], second[0]], 1),  # moved to another rank
        ([second[0], second[1][:-1] + b"!"], 1),
        ([second[0], b""], 1),
        ([OTHER.seal("gather 2 of rank 0", b"blue"), second[1]], 0),
    ):
        with pytest.raises(AuthenticationError, match=f"^what arrived from rank {named} is not"):
            zero.opened(bad)
    assert zero.opened(second) == [b"blue", b"square"]


def test_no_key_and_no_secret_is_ever_shown() -> None:
    secret = StreamSecret(b"never to be shown, not even once")
    shown = f"{secret!r} {secret} {Key.of(secret)!r} {LaunchEnvironment(secret=secret)!r}"
    assert "never" not in shown
    assert Key.of(secret).raw.hex() not in shown


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.1.2.3", "localhost"])
def test_ranks_that_meet_at_loopback_are_on_one_host(host: str) -> None:
    assert is_loopback(host)
    assert are_on_one_host(LaunchEnvironment(master_addr=host, world_size=2))


def test_ranks_that_torchrun_started_here_are_on_one_host_whatever_its_name() -> None:
    here = LaunchEnvironment(master_addr="gpu7", world_size=2, local_world_size=2)
    assert are_on_one_host(here)
    assert not are_on_one_host(LaunchEnvironment(master_addr="gpu7", world_size=2))
    spread = LaunchEnvironment(master_addr="192.0.2.1", world_size=4, local_world_size=2)
    assert not are_on_one_host(spread)
