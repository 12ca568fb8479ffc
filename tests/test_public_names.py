"""What a user imports is short, complete, documented, and costs no PyTorch until it is used."""

import subprocess
import sys

import pytest

import scope_rt

MEANT = {
    "Ack",
    "AppliedAt",
    "Chunk",
    "ContractError",
    "InputPictures",
    "IntegrityError",
    "Interpolation",
    "LinkError",
    "MotionNoise",
    "Pace",
    "ParityError",
    "Receipt",
    "RecordingError",
    "Retraction",
    "ScheduledEvent",
    "ScopeError",
    "SnapshotError",
    "Steering",
    "StreamConfig",
    "StreamSession",
    "TransitionSpec",
    "UserInputError",
    "VideoInput",
    "__version__",
    "register_codec",
    "register_text_encoder",
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(scope_rt.__all__) == MEANT
    assert set(dir(scope_rt)) == MEANT


@pytest.mark.parametrize("name", sorted(MEANT - {"__version__"}))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(scope_rt, name)
    assert value.__doc__
    members = vars(value).items() if isinstance(value, type) else ()
    methods = [m for key, m in members if callable(m) and not key.startswith("_")]
    assert all(method.__doc__ for method in methods if method.__module__.startswith("scope_"))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rank'"):
        scope_rt.Rank  # noqa: B018


def test_importing_the_package_loads_no_pytorch() -> None:
    check = "import sys, scope_rt; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
