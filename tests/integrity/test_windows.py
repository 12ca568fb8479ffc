"""A cache shows frames where it had them written, whatever its policy says of them."""

import pytest

from scope_contracts.errors import CacheError
from scope_rt.config import StreamConfig
from scope_rt.kv_cache import ring
from scope_rt.session import StreamSession
from tests.integrity.corruption import PROMPT
from tests.tiny_folder import tiny_folder

AT, NUM_CHUNKS = 6, 8


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_policy_that_moves_frames_between_two_chunks_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    shown, turn = [], ring.slot_of_frame
    with (
        pytest.raises(CacheError, match="the window names latent frame"),
        StreamSession(StreamConfig.of(tiny_folder(), integrity=level)) as session,
    ):
        for chunk in session.stream(PROMPT, num_chunks=NUM_CHUNKS):
            shown.append(chunk.chunk_index)
            if chunk.chunk_index == AT - 1:
                monkeypatch.setattr(
                    ring, "slot_of_frame", lambda spec, frame: turn(spec, frame + 1)
                )
    assert shown == list(range(AT))
