"""A prompt has one meaning, whatever its wording; what cannot be meant is refused by name."""

import time
from itertools import permutations
from pathlib import Path

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.text.words import (
    WORDS,
    Background,
    Colour,
    SceneObject,
    SceneSpec,
    Shape,
    Speed,
    WordTextEncoder,
    parse,
)
from tests.rounding import gamma, unit_roundoff

TWO = SceneSpec(
    objects=(
        SceneObject(Colour.RED, Shape.CIRCLE),
        SceneObject(Colour.BLUE, Shape.SQUARE),
    ),
    speed=Speed.FAST,
    background=Background.NAVY,
)


def test_any_phrase_order_and_case_means_the_same_scene() -> None:
    phrases = ("a Red circle", "A BLUE SQUARE", "fast", "on navy")
    assert {parse(", ".join(order)) for order in permutations(phrases)} == {TWO}


def test_a_colour_belongs_to_the_shape_it_stands_next_to() -> None:
    assert parse("circle red and square blue, moving fast on a navy background") == TWO
    assert parse("a blue circle and a red square, fast, on navy") != TWO


def test_speed_and_background_have_defaults() -> None:
    scene = parse("white triangle")
    assert (scene.speed, scene.background) == (Speed.MEDIUM, Background.BLACK)


def test_a_long_prompt_is_read_in_a_time_that_grows_with_its_length_alone() -> None:
    start_s = time.process_time()
    with pytest.raises(UserInputError, match="two objects of one colour"):
        parse("red circle " * 100_000)  # 1.1 MB, which took 40 s
    with pytest.raises(UserInputError) as caught:
        parse("x" * 2**20)
    assert len(str(caught.value)) < 400
    assert time.process_time() - start_s < 10.0


def test_grey_is_gray() -> None:
    assert parse("red circle on grey") == parse("red circle on gray")


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("a red dragon", ["'dragon'", "circle", "purple", "navy", "slow"]),
        ("a circle", ["'circle' has no colour"]),
        ("a red circle on white", ["'white' has no shape", "navy"]),
        ("red blue circle square", ["'red' has no shape"]),
        ("a red circle and a red square", ["one colour"]),
        ("red circle, blue circle, green circle", ["3 objects"]),
        ("fast on navy", ["0 objects"]),
        ("", ["0 objects"]),
        ("a slow fast red circle", ["more than one speed (fast, slow)"]),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(prompt: str, names: list[str]) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(prompt)
    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_embeddings_do_not_depend_on_word_order() -> None:
    encoder = WordTextEncoder.from_seed(0)
    embedded = encoder(["a red circle and a blue square, fast, on navy"])
    assert torch.equal(embedded, encoder(["navy fast blue square red circle"]))
    assert embedded.shape == (1, 6, 64)


def test_different_scenes_have_different_embeddings() -> None:
    encoder = WordTextEncoder.from_seed(0)
    one, swapped, single = encoder(
        ["red circle blue square", "blue circle red square", "red circle"]
    )
    assert not torch.equal(one, swapped)
    assert torch.equal(one[0], single[0])
    assert torch.equal(single[1], encoder.words.weight[WORDS.index("none")])


def test_word_vectors_are_orthogonal_with_unit_rms() -> None:
    vectors = WordTextEncoder.from_seed(0).words.weight
    gram = vectors @ vectors.T / vectors.shape[1]
    rounding = 2 * unit_roundoff(torch.float16) + gamma(vectors.shape[1], torch.float32)
    assert (gram - torch.eye(len(WORDS))).abs().max() <= rounding


def test_a_saved_encoder_gives_the_same_bits(tmp_path: Path) -> None:
    encoder = WordTextEncoder.from_seed(3)
    encoder.save_pretrained(tmp_path)
    prompts = ["a green triangle, slow, on gray"]
    assert torch.equal(WordTextEncoder.from_pretrained(tmp_path)(prompts), encoder(prompts))


def test_a_missing_or_foreign_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="cannot load a text encoder"):
        WordTextEncoder.from_pretrained(tmp_path / "absent")
    WordTextEncoder.from_seed(0).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("triangle", "hexagon"))
    with pytest.raises(UserInputError, match="vocabulary"):
        WordTextEncoder.from_pretrained(tmp_path)
