"""A prompt is encoded twice alike, and its embeddings are those that are sent."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError
from scope_rt.checks import Checks
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.session import StreamSession
from scope_rt.tensor_digests import TensorDigests
from scope_rt.text.words import WORDS, WordTextEncoder
from tests.integrity.audited import nothing
from tests.integrity.corruption import PROMPT, Change, flip_bit
from tests.integrity.rank0_streams import UNTOUCHED, pixels, shown_with


def test_a_prompt_that_is_encoded_wrong_once_is_refused() -> None:
    slip = Change(FaultPoint.ENCODED, -1, lambda embeds: embeds * 1.01)
    with pytest.raises(IntegrityError, match=r"prompt .*: rank 0: its embeddings, encoded"):
        shown_with(slip)
    assert shown_with(slip, checks=replace(Checks(), text=nothing))


def test_a_prompt_that_is_encoded_wrong_leaves_the_stream_as_it_was() -> None:
    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 1:
            encoder = session.setup.text_encoder
            assert isinstance(encoder, WordTextEncoder)
            before = encoder.forward
            answers = iter([encoder(["a red circle"]), encoder(["a white circle"])])
            encoder.forward = lambda prompts: next(answers)  # type: ignore[method-assign]
            with pytest.raises(IntegrityError, match="encoded again"):
                session.prompt("a red circle")
            encoder.forward = before  # type: ignore[method-assign]

    clean = shown_with(UNTOUCHED)
    assert pixels(shown_with(UNTOUCHED, each=steer)) == pixels(clean)


def test_strict_refuses_a_prompt_of_an_encoder_that_reads_the_first_one_otherwise_now() -> None:
    refused: list[str] = []

    def steer(session: StreamSession, chunk: Chunk) -> None:
        encoder = session.setup.text_encoder
        assert isinstance(encoder, WordTextEncoder)
        if chunk.chunk_index == 1:
            before = encoder.forward
            encoder.forward = lambda prompts: before(prompts) * 1.01  # type: ignore[method-assign]
            with pytest.raises(IntegrityError, match="embeddings of the first prompt changed"):
                session.prompt("a white circle")
            refused.append("a white circle")

    shown = shown_with(UNTOUCHED, each=steer, integrity="strict", verify_within=32)
    assert refused
    assert {chunk.prompt for chunk in shown} == {PROMPT}
    with pytest.raises(IntegrityError, match=r"chunk 4: .* embeddings of the first prompt changed"):
        shown_with(UNTOUCHED, each=steer, integrity="strict", verify_within=8)


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_weight_of_the_text_encoder_is_found_before_the_next_prompt_is_used(level: str) -> None:
    """One that only the new prompt looks at; until then all embeddings are from before."""

    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 0:
            encoder = session.setup.text_encoder
            assert isinstance(encoder, WordTextEncoder)
            flip_bit(encoder.words.weight[WORDS.index("white")])
        if chunk.chunk_index == 1:
            with pytest.raises(IntegrityError, match=r"prompt .*: rank 0: weight text_encoder.wor"):
                session.prompt("a white circle")
            refused.append(chunk.chunk_index)

    refused: list[int] = []
    shown = shown_with(UNTOUCHED, each=steer, integrity=level)
    assert refused == [1]
    assert pixels(shown) == pixels(shown_with(UNTOUCHED, integrity=level))


def test_a_weight_that_changes_while_a_prompt_is_encoded_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both times the prompt is encoded alike."""
    forward, flipped = WordTextEncoder.forward, list[str]()

    def flip_first(encoder: WordTextEncoder, prompts: Sequence[str]) -> Tensor:
        if not flipped:
            flip_bit(encoder.words.weight)
            flipped.append("once")
        return forward(encoder, prompts)

    monkeypatch.setattr(WordTextEncoder, "forward", flip_first)
    with pytest.raises(IntegrityError, match=r"rank 0: weight text_encoder.words.weight changed"):
        shown_with(UNTOUCHED)
    flipped.clear()
    assert shown_with(UNTOUCHED, checks=replace(Checks(), text=nothing))


def test_weights_of_the_text_encoder_are_read_with_new_prompts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, read = TensorDigests.changed, list[str]()

    def noted(digests: TensorDigests, names: Iterable[str]) -> list[str]:
        those = list(names)
        read.extend(name for name in those if name.startswith("text_encoder."))
        return changed(digests, those)

    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index in (1, 2):
            session.prompt("a white circle")

    monkeypatch.setattr(TensorDigests, "changed", noted)
    shown_with(UNTOUCHED, each=steer, integrity="strict")
    assert read == 2 * ["text_encoder.words.weight"]


def test_embeddings_that_change_while_they_are_kept_are_not_sent() -> None:
    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 0:
            with torch.inference_mode():
                session.setup.conditioning("a white circle").embeds.add_(1)
            session.prompt("a white circle")

    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match="rank 0: the prompt's embeddings changed"):
        shown_with(UNTOUCHED, shown=shown, each=change)
    assert [chunk.prompt for chunk in shown] == [PROMPT]
