"""Nothing is said of a chunk whose group was ended while it was computed."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import ChunkTimeoutError, PeerLostError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.config import StreamConfig
from scope_rt.mesh.result_wait import ResultWait
from scope_rt.mesh.worker import LocalMesh, Worker
from scope_rt.session import StreamSession


class Watched:
    """Of a verifier or a comparison: what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, envelope: object, tensors: Mapping[str, Tensor]) -> None: ...

    def end(self, chunk: int, latents: Tensor, latents_sha256: str) -> None:
        self.asked.append("evidence")

    def before(self, chunk: int, digest: object) -> None: ...

    def after(self, chunk: int, elapsed_ms: float, evidence: object) -> None:
        self.asked.append("comparison")

    def close(self, chunk: int) -> None: ...


class Never:
    """A device that never finishes."""

    def query(self) -> bool:
        return False


def lost() -> None:
    raise PeerLostError("rank 2 closed the connection")


@pytest.mark.parametrize(
    ("wait", "error"),
    [
        (ResultWait(bound_s=1.0, check_group=lost), PeerLostError),
        (ResultWait(bound_s=0.05, event_of=lambda device: Never()), ChunkTimeoutError),
        (ResultWait(bound_s=1.0), None),
    ],
    ids=["group ended", "device hangs", "whole"],
)
def test_there_is_evidence_only_of_what_a_whole_group_finished(
    wait: ResultWait, error: type[Exception] | None
) -> None:
    with StreamSession(StreamConfig.of(integrity=IntegrityLevel.OFF)) as session:
        assert session._loop is not None
        mesh = session._loop._stages.mesh
        assert isinstance(mesh, LocalMesh)
        worker, watched = mesh._worker, Watched()
        assert isinstance(worker, Worker)
        worker._result_wait = wait
        worker._verifier = cast(Any, watched)
        worker._peer_check = cast(Any, watched)
        chunks = session.stream("a red circle", num_chunks=1)
        if error is None:
            assert torch.isfinite(next(chunks).latents).all()
            assert watched.asked == ["evidence", "comparison"]
            return
        with pytest.raises(error):
            next(chunks)
        assert watched.asked == []
