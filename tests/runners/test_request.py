from fractions import Fraction
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.topology import Topology
from scope_runners.request import StreamRequest, TimedPrompt, parse_stream_request


def test_times_are_exact_with_or_without_the_unit() -> None:
    request = parse_stream_request(
        ["--prompt", "p", "--seconds", "0.1", "--hard-cut-at", "0.3s", "--hard-cut-at", "2"]
    )
    assert request.seconds == Fraction(1, 10)
    assert request.hard_cut_at == (Fraction(3, 10), Fraction(2))


def test_a_prompt_may_contain_colons_and_repeat() -> None:
    request = parse_stream_request(
        ["--prompt", "p", "--prompt-at", "6s:a: b", "--prompt-at", "7:c", "--out", "x.mp4"]
    )
    assert request.prompt_at == (TimedPrompt(Fraction(6), "a: b"), TimedPrompt(Fraction(7), "c"))
    assert request.out == Path("x.mp4")


def test_later_flags_win_and_tp_follows_the_plan() -> None:
    first = parse_stream_request(["--prompt", "a", "--prompt", "b", "--plan", "tp_v1_1"])
    assert (first.prompt, _tp_degree(first)) == ("b", 2)
    assert _tp_degree(parse_stream_request(["--prompt", "a", "--plan", "pp1"])) == 1


def _tp_degree(request: StreamRequest) -> int:
    return Topology.of(request.config.mesh.plan, request.config.mesh.tp).tp_degree


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "-3"], "--seconds"),
        (["--seconds", "soon"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--prompt-at", "6s"], "--prompt-at"),
        (["--prompt-at", "six:a red circle"], "--prompt-at"),
        (["--prompt-at", "6s:  "], "--prompt-at"),
        (["--hard-cut-at", "10 m"], "--hard-cut-at"),
        (["--plan", "pp7"], "^--plan: 'pp7' is not one of single, .*pp1"),
        (["--tp", "two"], "--tp"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_bad_syntax_is_one_sentence_that_names_the_flag(arguments: list[str], names: str) -> None:
    with pytest.raises(UserInputError, match=names) as caught:
        parse_stream_request(["--prompt", "a red circle", *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["log = 'x'", "record_latents = true", "snapshot = 'x'"])
def test_files_that_follow_from_out_and_record_are_refused_in_a_configuration(
    line: str, tmp_path: Path
) -> None:
    path = tmp_path / "stream.toml"
    path.write_text(f"[recovery]\nmax_restarts = 1\n{line}\n")
    name = line.split()[0]
    with pytest.raises(UserInputError, match=rf"\[recovery\] {name}: .*use --out and --record"):
        parse_stream_request(["--prompt", "p", "--config", str(path)])


def test_a_prompt_is_required() -> None:
    with pytest.raises(UserInputError, match="--prompt"):
        parse_stream_request([])
