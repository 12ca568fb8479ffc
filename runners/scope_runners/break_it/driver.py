"""Every run ends within its bound, and none of its processes outlives it, whatever happens in it.

The ranks are started as a user's ranks are. Ranks that hang or are stopped are killed at the bound;
the run is then reported as hung.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from PIL import Image

from scope_contracts.errors import ScopeError
from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import CacheUpkeep, NewText
from scope_rt.topology import Topology
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.events import EventKind, read_events
from scope_runners.break_it.faults import FaultPlan, encode, read_log
from scope_runners.break_it.instruments import DISARM, FAULTS
from scope_runners.break_it.job import RankJob, RunOptions, Script, ScriptEvent
from scope_runners.break_it.observation import Observation, seconds_per_chunk
from scope_runners.break_it.scenario import Pace, Scenario, unaffected
from scope_runners.break_it.two_hosts import start_on_two_hosts
from scope_runners.break_it.watch import Watch, start_here
from scope_runners.launcher import launch_attempts
from scope_runners.rank_group import Attempt

MOST_RESTARTS = 2
_START_PICTURE = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs scenarios on one model; each run keeps its files in a folder of its own in `folder`."""

    model: str
    """As `ModelConfig.folder`."""
    family: str | None
    """As `ModelConfig.recipe`."""
    recomputing_family: str | None
    """That of the same model as one that keeps its cache by recompute."""
    recipe: Recipe
    """Of `family`."""
    prompt: str
    folder: Path
    parts: str | None = None
    """The module that registers the model's codec and text encoder, where it is needed."""
    bound_s: float = 90.0
    """Of one attempt: every start of a rank begins it anew."""
    hang_bound_s: float = 20.0
    """Of a run with a detector disarmed, beyond what a clean one takes here."""
    heartbeat_s: float = 5.0
    launch: Callable[..., int] = launch_attempts
    """How the ranks of one machine are started."""
    _num_runs: int = 0
    _clean: dict[tuple[Script, Topology], Observation] = field(default_factory=dict)

    def pace(self, topology: Topology) -> Pace:
        """How fast a clean stream is on `topology`."""
        seen = self.clean(Script(), topology)
        return Pace(
            heartbeat_s=self.heartbeat_s,
            chunk_s=seconds_per_chunk(seen),
            num_calls=len(self.recipe.timesteps) + 1,
        )

    def run(self, scenario: Scenario, *, disarmed: Iterable[Detector] = ()) -> Observation:
        """Run `scenario` once; with detectors disarmed nothing is started again."""
        without, bound_s = sorted(disarmed), self.bound_s
        if without:
            bound_s = self.hang_bound_s + self.clean(Script(), scenario.topology).length_s
        job = self._job(scenario)
        environ, began_s = self._environ(scenario, job, without), time.monotonic()
        with Watch(bound_s=bound_s) as watch:
            if scenario.cuts_connection:
                start_on_two_hosts(job, scenario.topology, environ, watch, cut_s=self._cut_s)
            else:
                restarts = scenario.expected.resumes and not without
                attempt = Attempt(
                    argv=[str(job.save())],
                    num_ranks=scenario.topology.world_size,
                    environ_of=lambda rank: environ | {**scenario.environ.get(rank, {})},
                )
                most = MOST_RESTARTS if restarts else 0
                start_here(job, attempt, watch, most_restarts=most, launch=self.launch)
            started = [e.pid for e in read_events(job.events) if e.kind is EventKind.STARTED]
            left_behind = watch.finish(started)
        lines = job.faults.read_text().splitlines() if job.faults.exists() else []
        return Observation(
            job=job,
            num_ranks=scenario.topology.world_size,
            events=read_events(job.events),
            happened=read_log(lines),
            began_s=began_s,
            ended_s=time.monotonic(),
            is_hung=watch.has_overrun,
            left_behind=left_behind,
        )

    def reference(self, seen: Observation, topology: Topology) -> dict[int, str]:
        """Digests of the chunks of a clean run that did what `seen` was asked to do.

        That is the same script, with a recompute wherever the group was started again and a hard
        cut wherever one took effect.
        """
        rebuilt = [ScriptEvent(chunk=chunk, recompute=True) for chunk in seen.resumed_at]
        cut = [ScriptEvent(chunk=event.chunk, hard_cut=True) for event in seen.of(EventKind.CUT)]
        script = seen.job.script.with_events(*rebuilt, *cut)
        if cut:
            script = replace(script, num_chunks=max(event.chunk for event in seen.emitted) + 1)
        return {event.chunk: event.sha256 for event in self.clean(script, topology).emitted}

    def clean(self, script: Script, topology: Topology) -> Observation:
        """A run of `script` in which nothing is broken; the same one every time.

        Raises:
            ScopeError: even that did not work, so no fault can be judged.
        """
        key = (script, topology)
        if key not in self._clean:
            scenario = Scenario(
                topology=topology, script=script, expected=unaffected(topology, headline="clean")
            )
            seen = self.run(scenario)
            if len(seen.emitted) != script.num_chunks:
                errors = (
                    "; ".join(failure.text for failure in seen.failures)
                    or "no rank reported an error"
                )
                raise ScopeError(
                    f"a stream of {topology.plan_id} --tp {topology.tp_degree} in which nothing "
                    f"is broken made {len(seen.emitted)} of {script.num_chunks} chunks in "
                    f"{self.bound_s:g} s: {errors}; where it is slow, give more time (--bound) or "
                    "a recipe of your own (--recipe mine.toml) with a smaller default_height and "
                    "default_width"
                )
            self._clean[key] = seen
        return self._clean[key]

    @property
    def _cut_s(self) -> float:
        """How long the connection stays cut: far longer than either end may take to report it."""
        return 3 * self.heartbeat_s + 3.0

    def _job(self, scenario: Scenario) -> RankJob:
        self._num_runs += 1
        folder = self.folder / f"run{self._num_runs:03}"
        folder.mkdir(parents=True)
        job = RankJob(
            model=self.model,
            family=self._family_of(scenario.script),
            plan=str(scenario.topology.plan_id),
            tp=scenario.topology.tp_degree,
            parts=self.parts,
            prompt=self.prompt,
            folder=str(folder),
            **{each.name: getattr(scenario, each.name) for each in fields(RunOptions)},
        )
        if scenario.script.has_start_frame:
            Image.fromarray(_START_PICTURE).save(job.image)
        return job

    def _family_of(self, script: Script) -> str | None:
        if script.recomputes_always:
            return self.recomputing_family
        if not script.has_start_frame or self.recipe.start_frame:
            return self.family
        model = ModelFolder.open(self.model, self.family)
        return _family_file(model, framewise_recipe(self.recipe), self.folder / "framewise.toml")

    def _environ(
        self, scenario: Scenario, job: RankJob, disarmed: list[Detector]
    ) -> dict[str, str]:
        faults = FaultPlan(faults=scenario.faults, log=str(job.faults))
        return {
            "SCOPE_HEARTBEAT_TIMEOUT_S": str(self.heartbeat_s),
            "SCOPE_DIGEST_EVERY": "1",
            FAULTS: encode(faults),
            DISARM: ",".join(disarmed),
            **scenario.shared,
        }


def recomputing_family(model: ModelFolder, given: str | None, into: Path) -> str | None:
    """The recipe of the same model with recompute for cache upkeep, a TOML file in `into`; `given`,
    the `ModelConfig.recipe` that `model` was opened with, where that is one.

    What such a model shows is no picture to judge, unless it was trained so; its messages are those
    of any recompute model.
    """
    recipe = model.recipe
    if not recipe.clean_pass:
        return given
    context_frames = max(1, recipe.window_frames - recipe.frames_per_block)
    recomputing = recompute_recipe(recipe, context_frames)
    return _family_file(model, recomputing, into / "recomputing.toml")


def _family_file(model: ModelFolder, recipe: Recipe, file: Path) -> str:
    file.write_text(replace(model.layout.family, recipe=recipe).to_toml())
    return str(file)


def framewise_recipe(recipe: Recipe) -> Recipe:
    """The recipe that runs the same model as one of one latent frame a chunk, which may begin with
    a picture."""
    return replace(
        recipe,
        frames_per_block=1,
        start_frame=True,
        cache_upkeep=CacheUpkeep.CLEAN_PASS,
        kv_cache_num_frames=0,
        rollout_frames=0,
        rollout_overlap=0,
        new_text=NewText.KEEP_CACHE,
    )


def recompute_recipe(recipe: Recipe, context_frames: int) -> Recipe:
    """The recipe that keeps the same model's cache by recompute; frames are latent frames."""
    return replace(
        recipe,
        cache_upkeep=CacheUpkeep.RECOMPUTE,
        kv_cache_num_frames=context_frames,
        window_frames=context_frames + recipe.frames_per_block,
        sink_frames=0,
        rollout_frames=0,
        rollout_overlap=0,
        new_text=NewText.KEEP_CACHE,
    )
