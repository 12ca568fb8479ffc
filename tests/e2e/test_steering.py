"""A running stream is steered by commands with an id: each takes effect once, also after a loss."""

from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Control
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Ack
from scope_rt.control.steering import Steering
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.record.reader import read_history
from scope_rt.session import StreamSession
from scope_runners.replay import main as replay
from tests.tiny_folder import write_tiny_folder

SOFT = TransitionSpec(num_chunks=3, method=Interpolation.SLERP, bias_floor=0.4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def config(folder: Path, place: Path, **settings: object) -> StreamConfig:
    files = {"log": place / "log.scope", "snapshot": place / "snapshot", "record_latents": True}
    return StreamConfig.of(folder, **({"seed": 5} | files | settings))


def steered(session: StreamSession, asked: dict[int, Steering], num_chunks: int) -> list[Chunk]:
    """Each asked for once that chunk was given, so that the one after it takes it."""
    shown: list[Chunk] = []
    for chunk in session.stream("a red circle", num_chunks=num_chunks):
        shown.append(chunk)
        if chunk.chunk_index in asked:
            session.steer(asked[chunk.chunk_index])
    return shown


def test_a_seed_and_a_bias_hold_from_their_chunk_on_and_replay_to_equal_bits(
    folder: Path, tmp_path: Path
) -> None:
    asked = {
        1: Steering(seed=77, command_id="s"),
        2: Steering(bias=0.5, command_id="b"),
        3: Steering(prompt="a blue square", transition=SOFT, command_id="p"),
    }
    with StreamSession(config(folder, tmp_path)) as session:
        steered(session, asked, 9)
    history = read_history(tmp_path / "log.scope")
    envelopes = [history.envelopes[index] for index in range(9)]
    by_id = {name: each for each in history.controls for name in each.command_ids}
    assert list(by_id) == ["s", "b", "p"]
    first = by_id["s"].chunk_index
    seeds = [each.base_seed for each in envelopes]
    assert seeds == [5] * first + [77] * (9 - first)
    first, soft = by_id["b"].chunk_index, by_id["p"].chunk_index
    biases = [each.kv_cache_attention_bias for each in envelopes]
    assert biases[:first] == [1.0] * first
    assert min(biases[soft : soft + 3]) < 0.5, "the transition leaves the new resting bias"
    assert set(biases[soft + 3 :]) == {0.5}
    assert replay([str(tmp_path / "log.scope"), "--model", str(folder)]) == 0


@pytest.mark.parametrize("num_shown", [2, 3, 4, 5])
def test_after_a_loss_every_command_is_known_that_took_effect_and_no_other(
    folder: Path, tmp_path: Path, num_shown: int
) -> None:
    session = StreamSession(config(folder, tmp_path))
    asked = {
        0: Steering(seed=9, command_id="seed"),
        1: Steering(hard_cut=True, prompt="a blue square", command_id="cut"),
        3: Steering(bias=0.5, command_id="bias"),
    }
    receipts = {}
    stream = session.stream("a red circle")
    for shown, chunk in enumerate(stream, start=1):
        if chunk.chunk_index in asked:
            steering = asked[chunk.chunk_index]
            receipts[steering.command_id] = session.steer(steering)
        if shown == num_shown:
            break
    session.log.close()  # as a killed process leaves it
    told = {name: receipt.wait(0) for name, receipt in receipts.items()}
    with StreamSession(config(folder, tmp_path, resume=True)) as session:
        for name, ack in told.items():
            applied = session.applied.get(name)
            if isinstance(ack, Ack):
                assert applied is not None, f"{name} was answered"
                assert (applied.chunk_index, applied.cache_epoch) == (
                    ack.chunk_index,
                    ack.cache_epoch,
                )
            if applied is None:
                session.steer(asked[{"seed": 0, "cut": 1, "bias": 3}[name]])
        list(session.stream("none", num_chunks=9))
    controls = [each for each in read_history(tmp_path / "log.scope").controls if each.command_ids]
    names = [name for each in controls for name in each.command_ids]
    assert sorted(names) == sorted(receipts), "each took effect once in the stream that is left"
    assert _in_effect(tmp_path) == _wanted(controls)


def _in_effect(place: Path) -> tuple[int, float]:
    last = read_history(place / "log.scope").envelopes[8]
    return last.base_seed, last.kv_cache_attention_bias


def _wanted(controls: list[Control]) -> tuple[int, float]:
    names = [name for each in controls for name in each.command_ids]
    return (9 if "seed" in names else 5), (0.5 if "bias" in names else 1.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"bias": 0.0}, "bias: got 0, want 0 < bias <= 1"),
        ({"bias": 1.5}, "bias: got 1.5"),
        ({"seed": -1}, "seed: got -1, want 0 to"),
        ({"transition": SOFT}, "a transition leads to a new prompt"),
        ({}, "nothing is asked for"),
        ({"hard_cut": True, "command_id": "x" * 129}, "command_id: give 128 bytes"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserInputError, match=sentence):
        Steering(**settings)  # type: ignore[arg-type]
