"""Each detector is disarmed in turn, and its fault injected: it must then hang or drift.

That shows that the detector matters: without it, the run hangs until it is killed, or emits a chunk
that looks plausible and is wrong. Where a second detector would catch the fault as well, both are
disarmed.
"""

from dataclasses import dataclass
from enum import StrEnum

from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.observation import Observation, seconds_per_chunk
from scope_runners.break_it.verdict import Result, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fault, and the detectors without which it gets through."""

    disarmed: tuple[Detector, ...]
    case: str

    def __str__(self) -> str:
        return f"{self.case} without {' and '.join(self.disarmed)}"


TRIALS = (
    Trial(disarmed=(Detector.ENV_PARITY,), case="backend-mismatch"),
    Trial(disarmed=(Detector.PREFLIGHT, Detector.KEPT), case="r0a/shortened"),
    Trial(disarmed=(Detector.LIFECYCLE, Detector.PLANNED), case="cache-reset/no-epoch"),
    Trial(disarmed=(Detector.CALL_BUDGET,), case="call-count/steps"),
    Trial(disarmed=(Detector.ANSWER, Detector.STATE_DIGEST, Detector.VALUES), case="stale-answer"),
    Trial(disarmed=(Detector.EPOCH_DROP,), case="late-result"),
    Trial(disarmed=(Detector.STATE_DIGEST,), case="bias-on-the-mesh"),
    Trial(disarmed=(Detector.SCALAR_DIGEST,), case="bias-on-one-rank"),
    Trial(disarmed=(Detector.INPUT_DIGEST,), case="bit-flip/inputs"),
    Trial(disarmed=(Detector.FINGERPRINT,), case="weights/at-load"),
    Trial(disarmed=(Detector.FINGERPRINT, Detector.LINEAR_SUMS), case="weights/mid-stream"),
    Trial(
        disarmed=(Detector.DERIVED, Detector.LINEAR_SUMS, Detector.ORACLE),
        case="text-noise/strict",
    ),
    Trial(disarmed=(Detector.ROWS,), case="rows-zeros/strict"),
    Trial(disarmed=(Detector.REPLICATED, Detector.NOISE), case="noise-one-rank/default"),
    Trial(
        disarmed=(
            Detector.NUMERICS,
            Detector.REPLICATED,
            Detector.REDUCED_SUMS,
            Detector.ORACLE,
            Detector.LINEAR_SUMS,
            Detector.EDGES,
        ),
        case="precision-one/default",
    ),
    Trial(
        disarmed=(Detector.VALUES, Detector.KEPT, Detector.EMITTED),
        case="latents-repeated/default",
    ),
    Trial(disarmed=(Detector.PLANNED,), case="bias-planned/default"),
    Trial(disarmed=(Detector.PLANNED,), case="control-lost/default"),
    Trial(disarmed=(Detector.KEPT,), case="context-planned/default"),
    Trial(disarmed=(Detector.DECODED,), case="frames-shifted/strict"),
    Trial(disarmed=(Detector.FINGERPRINT, Detector.CODEC), case="codec-weight/strict"),
    Trial(disarmed=(Detector.TEXT,), case="text-encoded/default"),
    Trial(disarmed=(Detector.EMITTED,), case="frames-earlier/default"),
    Trial(disarmed=(Detector.ORACLE,), case="kernel/default"),
    Trial(disarmed=(Detector.CACHED_ROWS,), case="early-write/strict"),
    Trial(disarmed=(Detector.REDUCED_SUMS,), case="sums-all-ranks/default"),
    Trial(disarmed=(Detector.CANARY,), case="last-block/default"),
    Trial(disarmed=(Detector.EDGES,), case="head/default"),
    Trial(disarmed=(Detector.NOISE,), case="noise-all-ranks/default"),
    Trial(disarmed=(Detector.MADE_STATE,), case="modulation-made/default"),
    Trial(disarmed=(Detector.HEARTBEAT,), case="stop/follower"),
    Trial(disarmed=(Detector.SLOW_RANK,), case="slow-rank"),
)


class Outcome(StrEnum):
    """What a fault does when its detectors are disarmed."""

    HANG = "hang"
    DRIFT = "drift"
    CRAWL = "crawl"
    """The stream is right, and far too slow."""
    CAUGHT = "caught"
    """Something else refused it."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """How a trial ended, with the detectors and without them."""

    trial: Trial
    armed: Result
    disarmed: Result
    outcome: Outcome
    what_happened: str

    @property
    def shows_it(self) -> bool:
        """Whether it is these detectors that stop the fault."""
        got_through = self.outcome in (Outcome.HANG, Outcome.DRIFT, Outcome.CRAWL)
        return self.armed.verdict is Verdict.PASSED and got_through

    @property
    def progress(self) -> str:
        """In a line, while others are tried."""
        return f"{self.trial}: {self.outcome}"


def judge_trial(
    trial: Trial, *, armed: Result, disarmed: Result, seen: Observation, chunk_s: float
) -> TrialResult:
    """`seen` is the run without the detectors, `chunk_s` what a chunk takes in a clean run."""
    outcome, what = _outcome(disarmed, seen, chunk_s)
    return TrialResult(
        trial=trial, armed=armed, disarmed=disarmed, outcome=outcome, what_happened=what
    )


def _outcome(disarmed: Result, seen: Observation, chunk_s: float) -> tuple[Outcome, str]:
    if not disarmed.has_happened:  # a run that was slow to start is no hang of this fault
        return Outcome.NOTHING, "; ".join(["the fault did not happen", *disarmed.sentences[:1]])
    fault_s, pace_s = seen.fault_s or seen.began_s, seconds_per_chunk(seen)
    hung = f"hung until it was ended, {seen.ended_s - fault_s:.0f} s after the fault"
    if disarmed.num_wrong:
        wrong = f"{disarmed.num_wrong} of {disarmed.num_chunks} chunks emitted were wrong"
        ends = [f"{failure.error} came" for failure in seen.failures[:1]]
        then = [f"it {hung}"] if seen.is_hung else ends
        return Outcome.DRIFT, "; then ".join([wrong, *then])
    if disarmed.sentences:
        return Outcome.CAUGHT, disarmed.sentences[0]
    if pace_s > 2 * chunk_s and seen.emitted[-1].at_s > fault_s + pace_s:
        times = f"{pace_s / chunk_s:.0f} times"
        return Outcome.CRAWL, f"every chunk took {times} as long, and no rank said so"
    return (Outcome.HANG, hung) if seen.is_hung else (Outcome.NOTHING, "nothing")


def detectors_table(results: list[TrialResult]) -> str:
    """As Markdown, for the terminal and for the runbook."""
    lines = [
        "| disarmed | fault | armed | without it |",
        "|---|---|---|---|",
    ]
    for result in results:
        names = " and ".join(f"`{name}`" for name in result.trial.disarmed)
        fault = f"{result.armed.number} `{result.trial.case}` on {result.armed.plan}"
        armed = f"{result.armed.expected}: {result.armed.verdict}"
        lines.append(
            f"| {names} | {fault} | {armed} | **{result.outcome}**: {result.what_happened} |"
        )
    return "\n".join(lines)
