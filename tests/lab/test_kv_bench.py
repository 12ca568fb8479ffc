import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from scope_contracts.errors import CacheError
from scope_lab.kv_bench import run as kv_bench
from scope_lab.kv_bench.report import PEAK_NOTE, table
from scope_lab.kv_bench.result import Curve, Effort, Line, Part, Quality, SystemResult
from scope_lab.main import main

PSNR = Quality(name="PSNR", value=41.25, unit="dB")
PLAIN = SystemResult(
    name="plain", bytes_per_token=1536, peak_bytes=3 << 20, throughput_vs_recompute=7.25
)
INT8 = SystemResult(name="int8", bytes_per_token=800, quality=(PSNR,), notes=("rough",))
FP8 = SystemResult(name="fp8", cannot_run="no GPU of this kind")
POINTS = ((16.0, 0.5), (32.0, 1.0))


def curve(key: str, *lines: str) -> Curve:
    return Curve(
        key=key,
        title="budget",
        x_label="rows",
        y_label="right, %",
        lines=tuple(Line(name=name, points=POINTS) for name in lines),
        log_x=True,
    )


PART = Part(
    title="Storage",
    systems=(PLAIN, INT8, FP8),
    curves=(curve("budget", "a", "b"), curve("budget", "a"), curve("speed", "a")),
    notes=("one model",),
)


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Effort]]:
    """Every part is made to find `PART`; what was asked for is noted."""
    asked: list[tuple[str, Effort]] = []

    def import_module(name: str) -> ModuleType:
        module = ModuleType(name)

        def measure(effort: Effort) -> Part:
            asked.append((name.rpartition(".")[2], effort))
            return PART

        vars(module)["measure"] = measure
        return module

    monkeypatch.setattr(kv_bench, "import_module", import_module)
    return asked


def cells(markdown: str) -> Iterable[list[str]]:
    for line in markdown.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_only_columns_that_some_system_fills() -> None:
    head, _, plain, int8 = cells(table(PART))
    assert head == ["system", "B/token", "peak KiB", "x recompute", "PSNR dB"]
    assert plain == ["plain", "1,536", "3,072", "7.25", ""]
    assert int8 == ["int8", "800", "", "", "41.2"]


def test_a_table_with_peaks_says_what_they_count() -> None:
    assert f"* {PEAK_NOTE}" in table(PART).splitlines()
    assert PEAK_NOTE not in table(Part(title="No peak", systems=(INT8,)))


def test_a_system_that_cannot_run_here_says_why_instead_of_figures() -> None:
    text = table(PART)
    assert "* fp8: not run here: no GPU of this kind" in text
    assert "| fp8" not in text


def test_a_system_that_cannot_run_may_not_have_figures() -> None:
    with pytest.raises(CacheError, match="fp8 cannot run here and yet has figures"):
        SystemResult(name="fp8", bytes_per_token=1, cannot_run="no GPU")


def test_only_the_parts_that_were_asked_for_are_measured(
    two_parts: list[tuple[str, Effort]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv_bench", "--only", "video", "needle", "--quick"]) == 0
    assert two_parts == [("video_quality", Effort.QUICK), ("needle", Effort.QUICK)]
    assert capsys.readouterr().out.count("## Storage") == 2


def test_without_only_every_part_is_measured_in_full(two_parts: list[tuple[str, Effort]]) -> None:
    assert main(["kv_bench"]) == 0
    assert len(two_parts) == len(kv_bench.PartName)
    assert {effort for _, effort in two_parts} == {Effort.FULL}


def test_json_is_one_object_that_holds_every_figure(
    two_parts: list[tuple[str, Effort]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv_bench", "--only", "paged", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)["parts"]["paged"]
    assert part["systems"][0]["bytes_per_token"] == 1536
    assert part["systems"][2]["cannot_run"] == "no GPU of this kind"
    assert part["curves"][0]["lines"][0]["points"] == [list(point) for point in POINTS]


def test_curves_of_one_key_are_panels_of_one_picture(
    two_parts: list[tuple[str, Effort]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["kv_bench", "--only", "needle", "--out", str(tmp_path / "plots")]) == 0
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [picture.name for picture in pictures] == ["budget.png", "speed.png"]
    with Image.open(pictures[0]) as two, Image.open(pictures[1]) as one:
        assert two.size == pytest.approx((2 * one.width, one.height), abs=2)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is drawn."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = list[Any](), figure.savefig

    def savefig(self: Any, *args: Any, **kwargs: Any) -> None:
        drawn.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure, "savefig", savefig)
    return drawn


def test_lines_that_all_panels_share_are_explained_once_where_they_hide_nothing(
    figures: list[Any], tmp_path: Path
) -> None:
    from scope_lab.kv_bench.plots import write_plots

    alike = [curve("alike", "a", "b"), curve("alike", "a", "b")]
    write_plots([*alike, curve("apart", "a", "b"), curve("apart", "a")], tmp_path)
    shared, apart = figures
    (legend,) = shared.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    below = legend.get_window_extent()
    for axis in shared.axes:
        assert axis.get_legend() is None
        assert not below.overlaps(axis.get_tightbbox())
    assert not apart.legends
    assert all(axis.get_legend() for axis in apart.axes)


@pytest.mark.parametrize("name", ["hierarchical, full attention, formula at b=0.89", "h2o", "i"])
def test_a_legend_below_the_panels_is_shown_whole(
    figures: list[Any], tmp_path: Path, name: str
) -> None:
    from scope_lab.kv_bench.plots import write_plots

    write_plots([curve("long", *(f"{name} {number}" for number in range(8)))], tmp_path)
    (figure,) = figures
    below, picture = figure.legends[0].get_window_extent(), figure.bbox
    assert below.x0 >= picture.x0
    assert below.x1 <= picture.x1
    assert below.y0 >= picture.y0
    assert not below.overlaps(figure.axes[0].get_tightbbox())


def test_lines_of_equal_figures_can_all_be_seen(figures: list[Any], tmp_path: Path) -> None:
    from scope_lab.kv_bench.plots import write_plots

    write_plots([curve("same", "a", "b", "c")], tmp_path)
    lines = figures[0].axes[0].lines
    sizes = [line.get_markersize() for line in lines]
    assert sizes == sorted(set(sizes), reverse=True)
    assert {line.get_markerfacecolor() for line in lines} == {"none"}


def test_a_folder_that_cannot_be_made_is_one_sentence(
    two_parts: list[tuple[str, Effort]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    assert main(["kv_bench", "--only", "needle", "--out", str(tmp_path / "file")]) == 2
    assert "choose a folder" in capsys.readouterr().err
    assert two_parts == [], "it was checked before anything was measured"


def test_a_library_that_is_missing_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(kv_bench, "import_module", import_module)
    assert main(["kv_bench", "--only", "needle"]) == 2
    assert "scripts/lab kv_bench" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--only", "all"], ["--threads", "0"]])
def test_an_argument_that_cannot_be_used_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv_bench", *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err
