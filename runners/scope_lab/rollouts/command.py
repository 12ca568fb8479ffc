"""`scripts/lab parity FOLDER --rollout NAME`: a stream computes what a project's own code did.

The whole runtime runs: text encoder, planner, links, generator ranks, decoder. What differs from
any other stream is where noise comes from, and an anchor that the project's own decoder made.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scope_contracts.envelope import PlanId
from scope_lab.rollouts.rank import RESULT, RolloutRun, run
from scope_lab.rollouts.recording import Recording
from scope_rt.models.layout import Layout
from scope_rt.topology import RUNNABLE, Topology
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser
from scope_runners.launcher import launch

LATENTS, PIXELS, TEXT = 1e-4, 1e-4, 1e-5
"""What fp32 may differ by; the smallest mistake moves latents by 3e-3."""
_TIMESTEPS = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """How far a stream is from its recording; pixels are None where none are recorded."""

    rollout: str
    family: str
    plan: str
    tp: int
    token_ids_equal: bool
    text_max_abs_diff: float
    latents_max_abs_diff: float
    context_max_abs_diff: float
    pixels_max_abs_diff: float | None
    num_pixels_compared: int
    pixels_recorded: int
    decoder: str
    shown_as_decoded: bool
    trace_matches: bool
    first_call_that_differs: str

    @property
    def passed(self) -> bool:
        return (
            self.token_ids_equal
            and self.trace_matches
            and self.shown_as_decoded
            and self.text_max_abs_diff <= TEXT
            and max(self.latents_max_abs_diff, self.context_max_abs_diff) <= LATENTS
            and (self.pixels_max_abs_diff or 0.0) <= PIXELS
        )


def main(argv: Sequence[str]) -> int:
    """Run one recording; exit 0 if the stream agrees with it, 1 if not.

    Raises:
        UserInputError: the folder or the recording cannot be used.
    """
    parser = CommandParser(prog="scripts/lab parity", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a checkpoint with NAME.rollout.safetensors")
    add("--rollout", required=True, metavar="NAME")
    add("--recipe", metavar="NAME", help="a family, or a .toml file (default: files tell it)")
    add("--plan", choices=RUNNABLE, default=PlanId.SINGLE, type=PlanId)
    add("--tp", type=positive, help="ranks that share the heads (default: the plan's smallest)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    report = compare(args.folder, args.rollout, recipe=args.recipe, plan=args.plan, tp=args.tp)
    plain = asdict(report) | {"passed": report.passed}
    if args.json:
        print(json.dumps(plain))
    else:
        print("\n".join(f"{name:<24} {value}" for name, value in plain.items()))
    return 0 if report.passed else 1


def compare(
    folder: Path,
    rollout: str,
    *,
    recipe: str | None = None,
    plan: PlanId = PlanId.SINGLE,
    tp: int | None = None,
) -> RolloutReport:
    """Run a recording under a plan, in processes of their own where it needs several ranks.

    Raises:
        UserInputError: the folder or the recording cannot be used.
    """
    recording = Recording.read(folder, rollout)
    given = Layout.of(folder, recipe).family
    family = recording.family_of(given)
    topology = Topology.of(plan, tp)
    with TemporaryDirectory(prefix="rollout-parity-") as place:
        path = Path(place) / "recipe.toml"
        path.write_text(family.to_toml())
        asked = RolloutRun(
            folder=folder, rollout=rollout, recipe=path, plan=plan, tp=tp, answers=Path(place)
        )
        if topology.world_size == 1:
            run(asked)
        elif code := launch("scope_lab.rollouts.rank", asked.argv(), num_ranks=topology.world_size):
            raise SystemExit(code)
        result = json.loads((Path(place) / RESULT).read_text())
        traces = [
            json.loads((Path(place) / f"calls.{rank}.json").read_text())
            for rank in topology.generator_ranks
        ]
    differing = next((why for trace in traces if (why := _first_difference(trace, recording))), "")
    return RolloutReport(
        rollout=rollout,
        family=given.name,
        plan=plan,
        tp=topology.tp_degree,
        trace_matches=not differing,
        first_call_that_differs=differing,
        **result,
    )


def _first_difference(trace: Sequence[Sequence[float]], recording: Recording) -> str:
    """In words; "" where every call is as recorded."""
    recorded: list[dict[str, Any]] = recording.details["calls"]
    names = ("current_start_token", "global_end_index", "local_end_index")
    for number, (mine, call) in enumerate(zip(trace, recorded, strict=False)):
        known = {name: got for name, got in zip(names, mine[1:], strict=True) if name in call}
        want = {name: call[name] for name in known}
        if abs(mine[0] - call["timestep"]) > _TIMESTEPS or known != want:
            return f"call {number}: {mine}, recorded {[call['timestep'], *want.values()]}"
    if len(trace) != len(recorded):
        return f"{len(trace)} calls, recorded {len(recorded)}"
    return ""
