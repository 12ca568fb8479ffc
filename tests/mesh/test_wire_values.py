"""What ranks tell each other arrives as it was sent, and garbage is refused by a named error."""

from collections.abc import Callable

import pytest
import torch

from scope_contracts.errors import ContractError, LinkError
from scope_contracts.lifecycle import StreamPosition
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.mesh.authentic import SealedStore
from scope_rt.mesh.failures import RankAddresses
from scope_rt.mesh.heartbeat import Heartbeat
from scope_rt.mesh.loaded import (
    MeshResumePoint,
    RankLoaded,
    WeightsLoaded,
    decode_loaded,
    encode_loaded,
)
from scope_rt.mesh.meeting_point import host_store
from scope_rt.mesh.peer_check import PeerReport
from scope_rt.mesh.rendezvous import Roster
from scope_rt.mesh.reported import Failure, FailureKind
from scope_rt.trace import decode_spans
from tests.mesh.meetings import meet_two, point_at

POINT = MeshResumePoint(
    position=StreamPosition(call_id=4, chunk_index=3, cache_epoch=1, next_start_frame=9),
    tail=StreamTail(
        chunks=(
            TailChunk(
                start_frame=6, latents=torch.arange(6.0).view(1, 2, 3, 1, 1), latents_sha256="a"
            ),
            TailChunk(
                start_frame=0,
                latents=torch.ones(1, 2, 1, 1, 1, dtype=torch.bfloat16),
                latents_sha256="b",
            ),
        ),
        sinks=torch.empty(0),
    ),
)
HELD = {"blocks.0.weight": 2**64 - 1, "a": 0, "b": 2**63}


def test_a_rank_that_loaded_is_read_as_it_was_sent() -> None:
    weights = WeightsLoaded(held=HELD, used=HELD | {"a": 1}, stored={"file/a": 5}, known={})
    sent = RankLoaded(resume_point=POINT, weights=weights)
    read = decode_loaded(encode_loaded(sent))
    assert read.weights == weights
    assert read.resume_point.position == POINT.position
    got, want = read.resume_point.tail, POINT.tail
    assert got is not None
    assert want is not None
    assert [c.start_frame for c in got.chunks] == [c.start_frame for c in want.chunks]
    pairs = [*zip(got.chunks, want.chunks, strict=True)]
    tensors = [(one.latents, other.latents) for one, other in pairs]
    for tensor, sent_tensor in [*tensors, (got.sinks, want.sinks)]:
        assert tensor is not None
        assert sent_tensor is not None
        assert tensor.dtype == sent_tensor.dtype
        assert torch.equal(tensor, sent_tensor)


def test_a_rank_that_generates_nothing_and_resumed_nothing_says_so() -> None:
    read = decode_loaded(encode_loaded(RankLoaded()))
    assert read == RankLoaded()


REFUSED: dict[str, Callable[[bytes], object]] = {
    "loaded": decode_loaded,
    "peer report": PeerReport.decode,
    "addresses": RankAddresses.decode,
    "failure": Failure.decode,
    "roster": Roster.decode,
    "spans": decode_spans,
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"garbage",
        b"\x80",
        b"[[]]",
        b'[{"name": 1}]',
        b"\x05\x00\x00\x00\x81\xa1a\xc0\xc0",
    ],
)
def test_garbage_is_refused_by_a_named_error(kind: str, data: bytes) -> None:
    with pytest.raises(ContractError):
        REFUSED[kind](data)


def test_a_report_after_loading_that_is_cut_short_or_runs_on_is_refused() -> None:
    whole = encode_loaded(
        RankLoaded(weights=WeightsLoaded(held=HELD, used=HELD, stored=HELD, known=HELD))
    )
    for data in (whole[:-1], whole + b"\0", whole[:20]):
        with pytest.raises(ContractError):
            decode_loaded(data)


@pytest.mark.parametrize(
    "data", [b"nonsense", Failure(kind=FailureKind.CLOSED, text="").encode()[:-1]]
)
def test_a_reported_failure_that_cannot_be_read_is_still_a_link_error(data: bytes) -> None:
    store = host_store()
    first, second = meet_two(point_at(store.port))
    SealedStore(first.store, first.key.derive("heartbeat")).write("failure", data)
    for meeting in (first, second):
        heartbeat = Heartbeat(
            meeting, bound_s=1.0, start_s=20.0, abort=lambda failure: None, is_over=lambda: False
        )
        cause = heartbeat.cause_of(LinkError("symptom"))
        assert type(cause) is LinkError
        assert "cannot be read" in str(cause)


def test_a_long_failure_is_cut_to_what_a_message_takes() -> None:
    error = LinkError("ä" * 300)
    assert Failure.decode(Failure.of(error).encode()).text == "ä" * 128
