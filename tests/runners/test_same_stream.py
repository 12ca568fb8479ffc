"""Only the request that began a stream may resume it; what ends a video may change."""

import re
from pathlib import Path

import pytest

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Begun
from scope_lab.sample_log import opened
from scope_rt.control.scheduled_event import scheduled_record
from scope_rt.file_digest import FileDigest
from scope_rt.record.reader import StreamHistory
from scope_rt.topology import Topology
from scope_runners.job import OutputFiles, StreamJob, prepare
from scope_runners.leftovers import check_same_stream, is_finished
from scope_runners.request import parse_stream_request
from scope_runners.show import made_by_others
from tests.record.test_killed import header

ASKED = [
    *("--prompt", "a red circle", "--seconds", "3"),
    *("--prompt-at", "1.5s:a blue square", "--hard-cut-at", "6s"),
]
SOFT = ["--transition", "2"]


def job_of(*arguments: str) -> StreamJob:
    return prepare(parse_stream_request(arguments))


def history_of(job: StreamJob) -> StreamHistory:
    """What the log of `job` says."""
    history = StreamHistory()
    history.add(opened())
    history.add(Begun(at_s=0.0, prompt=job.request.prompt))
    for event in (*job.timeline.events, *job.timeline.later):
        history.add(scheduled_record(event))
    return history


def test_the_same_request_may_resume_and_be_longer() -> None:
    history = history_of(job_of(*ASKED, *SOFT))
    check_same_stream(history, job_of(*ASKED, *SOFT), Path("log"))
    check_same_stream(history, job_of(*ASKED, *SOFT, "--seconds", "30"), Path("log"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--prompt", "a white circle"], "--prompt is 'a white circle', .* 'a red circle'"),
        (["--prompt-at", "1.5s:a red square"], "--prompt-at is .*, and .* begun with 'a blue sq"),
        (["--prompt-at", "3s:a red square"], "--prompt-at is .*'a red square' at chunk 4, and"),
        (["--hard-cut-at", "9s"], "--hard-cut-at is at chunk 8, at chunk 12, and .* at chunk 8;"),
        (["--transition", "3"], "--transition is 3, and .* begun with 2;"),
        (["--transition-method", "lerp"], "--transition-method is lerp, and .* with slerp;"),
        (["--transition-bias", "0.5"], r"--transition-bias is 0\.5, and .* begun with 1\.0;"),
    ],
)
def test_another_request_is_refused_by_the_flag_that_differs(changed: list[str], told: str) -> None:
    history = history_of(job_of(*ASKED, *SOFT))
    with pytest.raises(UserInputError, match=told):
        check_same_stream(history, job_of(*ASKED, *SOFT, *changed), Path("log"))


def test_a_transition_that_no_prompt_takes_changes_nothing() -> None:
    asked = ["--prompt", "a red circle", "--seconds", "3"]
    check_same_stream(history_of(job_of(*asked)), job_of(*asked, *SOFT), Path("log"))


@pytest.mark.parametrize(
    ("is_begun", "is_published", "is_saved", "is_there", "want"),
    [
        (True, True, True, True, True),
        (True, False, True, True, False),
        (True, True, True, False, False),
        (False, False, False, True, True),
        (False, False, True, True, False),
    ],
    ids=["published", "still made", "deleted since", "nothing but the video", "its log is lost"],
)
def test_a_video_is_finished_when_its_log_says_so_or_nothing_but_it_is_there(
    tmp_path: Path,
    *,
    is_begun: bool,
    is_published: bool,
    is_saved: bool,
    is_there: bool,
    want: bool,
) -> None:
    files = OutputFiles(video=tmp_path / "a.mp4", trace=None)
    history = StreamHistory(published=FileDigest(num_bytes=0, blake2b="") if is_published else None)
    if is_begun:
        history.add(Begun(at_s=0.0, prompt="a red circle"))
    if is_there:
        files.video.write_bytes(b"a video, maybe of an earlier stream")
    assert is_finished(history, header(0, 0) if is_saved else None, files) == want


@pytest.mark.parametrize(
    ("plan", "tp", "said"),
    [
        (PlanId.PP0, 2, None),
        (PlanId.PP1, 2, "made by plan pp0 --tp 2; plan pp1 --tp 2, .* computes the same bits$"),
        (PlanId.SINGLE, 1, "plan single --tp 1, .* rounds otherwise: .* not the same bits$"),
    ],
)
def test_a_stream_that_other_ranks_resume_says_what_becomes_of_it(
    plan: PlanId, tp: int, said: str | None
) -> None:
    before = opened(plan_id=PlanId.PP0, tp_degree=2)
    sentence = made_by_others(before, Topology(plan_id=plan, tp_degree=tp))
    assert (sentence is None) is (said is None)
    assert re.search(said or "^$", sentence or "")
