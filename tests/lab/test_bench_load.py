"""The bench of loading says what ranks read and hold, and fails where that is too much."""

import json
from dataclasses import replace

import pytest

from scope_lab.bench_load import RankLoad, config_of, is_within, main


@pytest.mark.lab
@pytest.mark.parametrize("options", [[], ["--pt", "--dtype", "float32"]])
def test_ranks_read_their_slices_once_and_hold_little_more(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--gib", "0.02", "--tp", "2", "--rounds", "1", "--json", *options]) == 0
    loads = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in loads] == [0, 1]
    assert all(each["read_bytes"] <= 1.02 * each["slice_bytes"] for each in loads)


def test_who_reads_twice_or_holds_a_copy_fails() -> None:
    load = RankLoad(
        rank=0,
        load_s=1.0,
        read_s=1.0,
        kept_bytes=10**9,
        slice_bytes=10**9,
        read_bytes=10**9,
        peak_bytes=1_300_000_000,
    )
    assert is_within([load, load])
    assert not is_within([load, replace(load, read_bytes=2 * 10**9)])
    assert not is_within([load, replace(load, peak_bytes=1_320_000_000)])


def test_files_have_the_size_that_was_asked_for() -> None:
    assert config_of(2.0).dim == 5120
    assert config_of(2.0).num_layers > config_of(1.0).num_layers
