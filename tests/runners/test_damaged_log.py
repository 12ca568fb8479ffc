"""A flipped byte in a recording is named by every command that reads it, and never continued."""

from pathlib import Path

import pytest

from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Finished
from scope_runners.main import main
from tests.runners.streams import SHORT, lose_the_link_after


def places_of(path: Path) -> dict[str, int]:
    """A byte of every kind of place."""
    with path.open("rb") as file:
        entries = list(LogReader(file))
    chunk = next(entry for entry in entries if isinstance(entry.record, Finished))
    latents = chunk.end - chunk.record.num_blob_bytes
    return {
        "length": chunk.start,
        "checksum": chunk.start + 5,
        "record": chunk.start + 40,
        "length of latents": latents - 8,
        "checksum of latents": latents - 3,
        "latents": latents + 1000,
        "last record": entries[-1].end - 2,
    }


PLACES = ["length", "checksum", "record", "length of latents", "checksum of latents", "latents"]


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The recording of a stream that lost a rank, and can be resumed."""
    lose_the_link_after(2, tmp_path / "a.mp4", "--record", str(tmp_path / "a.scope"))
    return tmp_path / "a.scope"


@pytest.mark.parametrize("place", [*PLACES, "last record"])
def test_a_flipped_byte_is_named_on_resume_inspect_and_replay(
    left: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    whole, video = left.read_bytes(), left.with_name("a.mp4")
    position, published = places_of(left)[place], video.read_bytes()
    left.write_bytes(whole[:position] + bytes([whole[position] ^ 2]) + whole[position + 1 :])
    damaged = left.read_bytes()
    resume = ["stream", *SHORT[1:], "--out", str(video), "--record", str(left), "--resume"]
    for command in (["inspect", str(left)], ["replay", str(left)], ["verify", str(left)], resume):
        assert main(command) != 0, command
        assert "damaged" in capsys.readouterr().err.splitlines()[-1], command
        assert left.read_bytes()[: len(damaged)] == damaged, "what is whole stays on disk"
    if "latents" not in place:  # a resume needs the records only, and refuses before it changes any
        assert video.read_bytes() == published
