"""One frozen configuration of a stream: command line, Python, file and environment fill it alike.

An argument comes before a `SCOPE_*` variable, that before the file, that before the default. Every
rank of a stream must be given the same; what would make ranks compute differently is compared
before they start. What a launcher tells one process is `LaunchEnvironment`.
"""

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_rt.config_values import Bounds, converted, read_toml, unknown_name
from scope_rt.environment_names import refuse_unknown_variables

RECOMPUTE_NEVER = 999_999
LONGEST_WAIT_S = 1e9
"""Three decades, which every clock and lock still takes."""


def _setting(
    default: Any,
    *,
    variable: str | None = None,
    name: str | None = None,
    bounds: Bounds | None = None,
    by_variable_only: bool = False,
) -> Any:
    """A field with its `SCOPE_*` variable; `name` is its argument where that has another name.

    One `by_variable_only` is no setting of a file or of `of`.
    """
    metadata = {
        "variable": variable,
        "name": name,
        "bounds": bounds,
        "by_variable_only": by_variable_only,
    }
    return field(default=default, metadata=metadata)


_POSITIVE = Bounds(least=1)
_FACTOR = Bounds(above=1, most=LONGEST_WAIT_S, or_zero=True)
_WAIT = Bounds(above=0, most=LONGEST_WAIT_S, unit="seconds")


class _Part:
    """A part of the configuration: its numbers are within their bounds, or it does not exist."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            bounds, variable = setting.metadata["bounds"], setting.metadata["variable"]
            if bounds is not None:
                label = f"{setting.name} ({variable})" if variable else setting.name
                bounds.check(label, getattr(self, setting.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Part):
    """What is generated: sizes in pixels, None takes the model's own."""

    folder: str = _setting("tiny", name="model")
    """A model folder, a checkpoint's own file in one, or "tiny" for the embedded model."""
    recipe: str | None = _setting(None)
    """How it is sampled: the name of a family of checkpoints, or a TOML file; None is what the
    model's files tell."""
    dtype: DType | None = _setting(None)
    """Of weights, activations, cache and a chunk's latents; None is bfloat16 on GPUs, float32 on
    CPUs."""
    height: int | None = _setting(None)
    width: int | None = _setting(None)
    codec_device: str | None = _setting(None)
    """`cpu`, `cuda` or `cuda:0`, of each rank that decodes; None is where that rank computes."""
    codec_dtype: DType | None = _setting(None)
    """Of the codec's weights; None is float32 on a CPU, bfloat16 on a GPU."""
    text_device: str | None = _setting(None)
    """As `codec_device`, of the text encoder, which rank0 alone holds."""
    text_dtype: DType | None = _setting(None)
    """As `codec_dtype`."""
    text_offload: bool = _setting(False)
    """Whether a text encoder on a GPU lies on the CPU while it encodes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig(_Part):
    """Which ranks do what, what they compare, and how long they wait for each other."""

    plan: PlanId = _setting(PlanId.SINGLE)
    tp: int | None = _setting(None, bounds=_POSITIVE)
    """Ranks that share the model's heads; None is the plan's smallest degree."""
    attention_backend: str | None = _setting(None, variable="SCOPE_KV_BIAS_BACKEND")
    """None takes the device's default, the same on equal ranks."""
    digest_every: int = _setting(64, variable="SCOPE_DIGEST_EVERY", bounds=_POSITIVE)
    """Chunks from one comparison of the generator ranks to the next."""
    input_digest: bool = _setting(True, variable="SCOPE_TP_INPUT_DIGEST")
    """Whether every message on a link carries digests; with a secret it does in any case."""
    bring_up: bool = _setting(False, variable="SCOPE_BRING_UP")
    """Whether conditioning travels with every chunk, to be compared with what the mesh holds."""
    allow_compile: bool = _setting(False, variable="SCOPE_TP_ALLOW_COMPILE")
    """Not supported yet."""
    slow_rank_factor: float = _setting(0.0, variable="SCOPE_SLOW_RANK_FACTOR", bounds=_FACTOR)
    """How many times slower than the others a rank may be; 0 never objects."""
    heartbeat_timeout_s: float = _setting(10.0, variable="SCOPE_HEARTBEAT_TIMEOUT_S", bounds=_WAIT)
    """Within this a rank that gives no sign of life is named."""
    start_timeout_s: float = _setting(300.0, variable="SCOPE_START_TIMEOUT_S", bounds=_WAIT)
    """How long ranks wait for each other to come, to load the model, and at the end; and how long a
    chunk may be planned, generated or decoded."""
    group_timeout_s: float = _setting(60.0, variable="SCOPE_GROUP_TIMEOUT_S", bounds=_WAIT)
    """Bound of every transfer, every collective, of rank0's wait for a chunk and, of several ranks,
    of the wait for a GPU."""
    idle_timeout_s: float = _setting(3600.0, variable="SCOPE_IDLE_TIMEOUT_S", bounds=_WAIT)
    """How long a mesh rank waits for its next envelope before it gives up on rank0."""
    control_device: str | None = _setting(None)
    """Of a rank0 that does not generate: `cpu`, `cuda` or `cuda:1`; None is a GPU of its own, or
    its leader's where there is none to spare."""
    warm_up: bool | None = _setting(None)
    """Whether generator ranks generate a chunk that nobody sees before they are ready, so that
    what first calls cost falls into no chunk's bounds; None is on GPUs."""
    environment_plan: str | None = _setting(None, variable="SCOPE_TP_PLAN", by_variable_only=True)
    """The plan that the environment asks for; it must not contradict `plan` on any rank."""
    environment_pipelined: bool | None = _setting(
        None, variable="SCOPE_PP_ENABLED", by_variable_only=True
    )
    """Whether the environment asks for a pipelined plan; the same holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(_Part):
    """How the past is kept, and how much it weighs."""

    kv_cache: str = _setting("ring", variable="SCOPE_KV_CACHE")
    """`ring`, `quantized`, `h2o`, `paged` or `hierarchical`, all but `ring` also with a codec
    (`quantized:int4`)."""
    kv_cache_attention_bias: float | None = _setting(None, bounds=Bounds(above=0, most=1))
    """Weight of past chunks, 0 < bias <= 1; a transition may leave it and comes back to it. None is
    the recipe's."""
    recompute: str | None = _setting(None)
    """`r1`, `r0a` or `r0`, for models that keep their cache by recompute; None is `r0a`."""
    kv_cache_recompute_every: int | None = _setting(
        None, variable="SCOPE_KV_CACHE_RECOMPUTE_EVERY", bounds=_POSITIVE
    )
    """Chunks from one recompute to the next; None leaves it to the model's recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityConfig(_Part):
    """What is verified of numbers and state, and how often."""

    level: IntegrityLevel = _setting(
        IntegrityLevel.DEFAULT, variable="SCOPE_INTEGRITY", name="integrity"
    )
    verify_within: int = _setting(32, variable="SCOPE_VERIFY_WITHIN", bounds=_POSITIVE)
    """Chunks within which every weight and every cached row is verified once; in `strict` each is
    verified with every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(_Part):
    """What a stream begins with: equal seeds, pictures, prompts and schedules give equal ones."""

    seed: int = _setting(0, bounds=Bounds(least=0, most=2**63 - 1))
    image: Path | None = _setting(None)
    """A picture that the stream begins with, where the recipe takes a start frame: chunk 0 shows
    it. Only rank0 reads it, at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig(_Part):
    """What outlives a process of rank0, and what is tried after a loss."""

    log: Path | None = _setting(None)
    """The stream log, which only grows; None keeps none."""
    record_latents: bool = _setting(False)
    """Whether the log holds every chunk's latents, so that it can be replayed."""
    snapshot: Path | None = _setting(None)
    """A folder in which rank0 saves its resume point with every chunk; it needs a log."""
    resume: bool | None = _setting(None)
    """Whether to resume the stream of `snapshot`, or to replace it; None resumes what this run's
    ranks saved. But for False no stream is replaced, also none of which only `log` is there."""
    max_restarts: int = _setting(3, bounds=Bounds(least=0))
    """Starts in a row that may bring the stream no further, after the first one."""
    fallback_tp: int | None = _setting(None, bounds=_POSITIVE)
    """The TP degree after a loss; None keeps `tp`."""

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if self.snapshot is not None and self.log is None:
            raise UserInputError("snapshot needs a stream log; give log as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """All that determines a stream but its prompts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    @classmethod
    def of(cls, model: str | Path = "tiny", /, **settings: Any) -> Self:
        """The configuration with these settings and defaults for all others.

        It reads no environment: a `SCOPE_*` variable changes nothing here. `load` reads it.
        `settings` are the fields of all parts by name: `StreamConfig.of(plan="pp1", tp=2, seed=7)`.

        Raises:
            UserInputError: a name is unknown, or a value cannot be used; the sentence says which.
        """
        return cls._from_values(_known({"model": model} | settings))

    @classmethod
    def load(
        cls,
        *,
        file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Self:
        """The configuration of arguments, environment and file, in this order of precedence.

        Args:
            file: a TOML file with the tables `model`, `mesh`, `cache`, `integrity`, `sampling`,
                `recovery`.
            environ: the process's own by default.
            arguments: as for `of`; None is not given.

        Raises:
            UserInputError: a name is unknown, or a value cannot be used; the sentence says which.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        env = os.environ if environ is None else environ
        refuse_unknown_variables(env, variables())
        settings = ({} if file is None else _from_file(file)) | _from_environment(env)
        return cls._from_values(settings | _known(given))

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> Self:
        places = _places()
        parts: dict[str, dict[str, Any]] = {part.name: {} for part in fields(cls)}
        for name, value in values.items():
            part, setting = places[name]
            parts[part][setting.name] = converted(name, value, setting.type)
        return cls(**{name: _PARTS[name](**settings) for name, settings in parts.items()})

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by the name of its argument: `StreamConfig.of(**settings)` is this one,
        but for what the environment alone asks for."""
        return {name: value for name, value in self._values.items() if name in _settable()}

    @property
    def _values(self) -> dict[str, Any]:
        return {
            name: getattr(getattr(self, part), setting.name)
            for name, (part, setting) in _places().items()
        }

    def with_settings(self, **settings: Any) -> Self:
        """The same but for these."""
        return self._from_values(self._values | _known(settings))

    def in_effect(self) -> str:
        """What differs from the defaults, in one line: `plan=pp1 tp=2 seed=7`; without files."""
        defaults = StreamConfig()._values | {"log": self.recovery.log}
        defaults |= {"snapshot": self.recovery.snapshot}
        changed = {n: v for n, v in self._values.items() if v != defaults[n]}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "all defaults"


_PARTS: Mapping[str, Any] = {
    "model": ModelConfig,
    "mesh": MeshConfig,
    "cache": CacheConfig,
    "integrity": IntegrityConfig,
    "sampling": SamplingConfig,
    "recovery": RecoveryConfig,
}


def _places() -> dict[str, tuple[str, "Field[Any]"]]:
    """The part and the field of every setting, by the name of its argument."""
    return {
        setting.metadata["name"] or setting.name: (part, setting)
        for part, kind in _PARTS.items()
        for setting in fields(kind)
    }


def _settable() -> dict[str, tuple[str, "Field[Any]"]]:
    """Those of `_places` that a person may give by name."""
    return {n: place for n, place in _places().items() if not place[1].metadata["by_variable_only"]}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`; raises `UserInputError` for a name that is no setting."""
    settable = _settable()
    for name in values:
        if name not in settable:
            raise UserInputError(unknown_name(name, settable, "setting"))
    return dict(values)


def variables() -> dict[str, str]:
    """The name of the setting that each `SCOPE_*` variable gives."""
    return {
        setting.metadata["variable"]: name
        for name, (_, setting) in _places().items()
        if setting.metadata["variable"]
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    places, found = _places(), {}
    for variable, name in variables().items():
        if variable in environ:
            kind = places[name][1].type
            found[name] = converted(variable, environ[variable], kind, is_read=True)
    return found


def _from_file(path: Path) -> dict[str, Any]:
    places = {(part, setting.name): name for name, (part, setting) in _settable().items()}
    found = {}
    for part, table in read_toml(path).items():
        if part not in _PARTS:
            if home := next((place for place, key in places if key == part), None):
                raise UserInputError(f"{path}: {part!r} is no table; write it under [{home}]")
            raise UserInputError(f"{path}: {unknown_name(part, _PARTS, 'table')}")
        if not isinstance(table, dict):
            raise UserInputError(f"{path}: {part} is a table; write [{part}] above its settings")
        for key, value in table.items():
            if (part, key) not in places:
                known = [name for place, name in places if place == part]
                raise UserInputError(f"{path}: [{part}] {unknown_name(key, known, 'setting')}")
            name = places[part, key]
            setting, label = _places()[name][1], f"{path}: [{part}] {key}"
            found[name] = converted(label, value, setting.type)
            if setting.metadata["bounds"] is not None:
                setting.metadata["bounds"].check(label, found[name])
    return found
