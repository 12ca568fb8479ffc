"""A recorded rollout of a reference implementation, run again by this runtime, number for number.

A recording is `NAME.safetensors` (weights in the original Wan naming, noise, text, result) beside
`NAME.json` (sizes, and the cache indices after every generator call); tests/parity/README.md
describes both. The whole loop runs: planner, preflight, lifecycle, worker and, in `pp0`, the link.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import PlanId
from scope_contracts.lifecycle import Lifecycle
from scope_lab.reference_rollout import BlankDecoder, RecordedAnchors, Recording
from scope_lab.rollouts import command as rollouts
from scope_rt.attention.backend import backend_named
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.config import RECOMPUTE_NEVER, StreamConfig
from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.context import ContextMemory
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.loop import StreamLoop
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.control.stages import MeshPort, Stages
from scope_rt.faults import NoFaults
from scope_rt.instruments import Instruments
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.link import PeerLink
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.process_group import join_world
from scope_rt.mesh.worker import LocalMesh, RemoteMesh, Worker, serve_leader
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import build_transformer
from scope_rt.models.original_names import to_diffusers
from scope_rt.record.log import NullLog
from scope_rt.topology import Topology
from scope_runners.command_parser import CommandParser
from scope_runners.guarded import guarded
from scope_runners.launcher import launch

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""What fp32 reordering may move; a wrong window moves the result by 0.15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One generator call: timestep fed, first token written, and the indices it led to."""

    timestep: float
    current_start_token: int
    global_end_index: int
    local_end_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """How far the rollout is from the recording, and the index trace it took.

    `context_diff` is over the frames that recomputes consumed, `cache_diff` over keys and values
    left at the end; both are 0 where the recording holds none.
    """

    max_abs_diff: float
    context_diff: float
    cache_diff: float
    tolerance: float
    trace_matches: bool
    calls: tuple[TracedCall, ...]

    @property
    def passed(self) -> bool:
        worst = max(self.max_abs_diff, self.context_diff, self.cache_diff)
        return self.trace_matches and worst <= self.tolerance


class TracingWorker:
    """A generator rank for a recording; keeps the trace of its calls."""

    def __init__(self, recording: Recording, plan_id: PlanId, group: Collectives) -> None:
        self._recording, self._group = recording, group
        self.calls: list[TracedCall] = []
        weights = {name: w for name, w in recording.tensors.items() if name.startswith("model.")}
        recipe = recording.recipe()
        self._generator = ChunkGenerator(
            model=build_transformer(
                recording.config(), to_diffusers(weights), group, dtype=torch.float32, device=CPU
            ),
            cache=open_frame_cache(recording.cache_spec(), group=group, device=CPU),
            schedule=recipe.schedule,
            backend=backend_named("sdpa"),
            noise=recording.noise(),
            observe=self._observe,
        )
        self.worker = Worker(
            generator=self._generator,
            geometry=recording.geometry(),
            lifecycle=Lifecycle(plan_id=plan_id, frames_per_block=recipe.frames_per_block),
            peer_check=PeerCheck(
                ranks=(group.rank,),
                rank=group.rank,
                every=1,
                gather=None,
                waited_s=lambda: 0.0,
            ),
        )

    def _observe(self, timestep: float, start_token: int, indices: CacheIndices) -> None:
        self.calls.append(
            TracedCall(
                timestep=timestep,
                current_start_token=start_token,
                global_end_index=indices.global_end_index,
                local_end_index=indices.local_end_index,
            )
        )

    def cache_diff(self) -> float:
        """How far this rank's heads of the cache are from those recorded at the end."""
        worst, cache = 0.0, self._generator.cache
        for layer in range(cache.spec.num_layers):
            for name, mine in zip("kv", cache.cached(layer), strict=True):
                recorded = self._recording.tensors.get(f"final_cache.{layer}.{name}")
                if recorded is not None:
                    heads = recorded.chunk(self._group.size, dim=2)[self._group.rank]
                    worst = max(worst, float((mine[:, : heads.shape[1]] - heads).abs().max()))
        return worst


@dataclass(frozen=True, slots=True)
class Rollout:
    """What rank0 saw of it: the differences of its latents, and of the context it sent."""

    max_abs_diff: float
    context_diff: float


def drive(recording: Recording, mesh: MeshPort, plan_id: PlanId) -> Rollout:
    """Rank0's part: run the whole rollout through the loop and compare."""
    recipe, tensors = recording.recipe(), recording.tensors
    consumed: list[Tensor] = []

    class Watched(ContextMemory):
        def context(self, *, holds_cache: bool = False) -> Tensor:
            consumed.append(super().context(holds_cache=holds_cache))
            return consumed[-1]

    anchor_frames = AnchorFrames(
        RecordedAnchors(list(tensors.get("anchors", torch.empty(0)))[2:]),
        num_latents=recipe.context_frames,
        first_latent_frames=1,
        temporal_stride=4,
    )
    stages = Stages(
        mesh=mesh,
        context=Watched(recipe, anchor_frames, anchor=RecomputeAnchor.DECODED),
        noise=recording.noise(),
        geometry=recording.geometry(),
        cache=recording.cache_spec(),
    )
    settings = StreamSettings(
        plan_id=plan_id,
        recipe=recipe,
        height=recipe.default_height,
        width=recipe.default_width,
        base_seed=0,
        recompute_every=RECOMPUTE_NEVER if recipe.clean_pass else 1,
    )
    loop = StreamLoop(
        Planner(settings=settings),
        stages,
        BlankDecoder(frames_per_latent=4),
        max_in_flight=1,
        num_tail_frames=0,
        log=NullLog(),
        record_latents=False,
        instruments=Instruments(),
    )
    loop.inbox.post(Directive(conditioning=Conditioning("recorded", tensors["text_embeds"])))
    chunks = [chunk.latents for chunk in loop.run(len(recording.noise().start))]
    loop.close()
    latents = (torch.cat(chunks)[None] - tensors["latents"]).abs().max().item()
    context = 0.0
    recorded = list(tensors.get("context_frames", torch.empty(0)))
    if len(consumed) != len(recorded):
        context = math.inf
    for mine, theirs in zip(consumed, recorded, strict=False):
        context = max(context, (mine - theirs).abs().max().item())
    return Rollout(latents, context)


def replay(recording: Recording, group: Collectives | None = None) -> ParityReport:
    """Run the rollout in this process, on this rank's slice of the model, and compare."""
    mesh = TracingWorker(recording, PlanId.SINGLE, group or SoloCollectives())
    seen = drive(recording, LocalMesh(mesh.worker, None), PlanId.SINGLE)
    return report(recording, seen, mesh.calls, mesh.cache_diff())


def replay_on_ranks(recording: Recording, environment: LaunchEnvironment) -> ParityReport:
    """The same in `pp0`: rank0 plans, rank 1 generates; both end with the report."""
    topology = Topology(plan_id=PlanId.PP0, tp_degree=1)
    topology.check_world_size(environment.world_size)
    world = join_world(environment, StreamConfig.load().mesh)
    try:
        groups = world.build_groups(topology)
        assert groups.link is not None, "both ranks of pp0 with one generator rank are on the link"
        if environment.rank == 0:
            link = PeerLink(groups.link, peer=1)
            seen = drive(recording, RemoteMesh(link, recording.geometry()), PlanId.PP0)
            said = world.exchange(json.dumps([seen.max_abs_diff, seen.context_diff]).encode())
        else:
            mesh = TracingWorker(recording, PlanId.PP0, SoloCollectives())
            serve_leader(mesh.worker, PeerLink(groups.link, peer=0), None, NoFaults())
            calls = [asdict(call) for call in mesh.calls]
            said = world.exchange(json.dumps([calls, mesh.cache_diff()]).encode())
        rollout, (calls, cache_diff) = (json.loads(part) for part in said)
        return report(
            recording, Rollout(*rollout), [TracedCall(**call) for call in calls], cache_diff
        )
    finally:
        world.leave()


def report(
    recording: Recording, seen: Rollout, calls: list[TracedCall], cache_diff: float
) -> ParityReport:
    return ParityReport(
        max_abs_diff=seen.max_abs_diff,
        context_diff=seen.context_diff,
        cache_diff=cache_diff,
        tolerance=TOLERANCE,
        trace_matches=_same_trace(calls, recording.calls),
        calls=tuple(calls),
    )


def _same_trace(seen: list[TracedCall], recorded: list[dict[str, Any]]) -> bool:
    want = [
        TracedCall(
            timestep=seen_call.timestep
            if abs(seen_call.timestep - call["timestep"]) < 1e-2
            else call["timestep"],
            current_start_token=call["current_start_token"],
            global_end_index=call["global_end_index"],
            local_end_index=call["local_end_index"],
        )
        for seen_call, call in zip(seen, recorded, strict=False)
    ]
    return len(seen) == len(recorded) and seen == want


def main(argv: Sequence[str]) -> int:
    """Run one recording; exit 0 if it agrees, 1 if not, 2 if it cannot be read.

    A rank of it runs this too, without the laboratory's launcher around it.
    """
    run = rollouts.main if "--rollout" in argv else _run
    return guarded(lambda: run(argv), speaker="parity")


def _run(argv: Sequence[str]) -> int:
    other = "a checkpoint with recordings: scripts/lab parity FOLDER --rollout NAME"
    parser = CommandParser(prog="scripts/lab parity", description=__doc__, epilog=other)
    parser.add_argument("recording", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--plan", choices=(PlanId.SINGLE, PlanId.PP0), default=PlanId.SINGLE)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    recording, environment = Recording(args.recording), LaunchEnvironment.from_environment()
    if args.plan == PlanId.SINGLE:
        result = replay(recording)
    elif environment.launched:
        result = replay_on_ranks(recording, environment)
    else:
        return launch("scope_lab.parity", argv, num_ranks=2)
    if environment.rank == 0:
        _print(result, as_json=args.json)
    return 0 if result.passed else 1


def _print(result: ParityReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result) | {"passed": result.passed}))
        return
    print(f"{'timestep':>9}{'start':>8}{'global':>8}{'local':>8}")
    for call in result.calls:
        print(
            f"{call.timestep:9.1f}{call.current_start_token:8d}"
            f"{call.global_end_index:8d}{call.local_end_index:8d}"
        )
    trace = "as recorded" if result.trace_matches else "DIFFERS from the recording"
    print(f"index trace {trace}")
    print(f"max abs diff of latents {result.max_abs_diff:.3g}, bar {result.tolerance:.0e}")
    print(f"context frames {result.context_diff:.3g}, final cache {result.cache_diff:.3g}")
