"""What a project's own configuration says of how its model is sampled, as entries of a recipe.

The files are YAML, merged in order; nothing but plain values is read of them. What concerns
training, or what the project's own code does not read, is left alone.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from scope_contracts.errors import UserInputError, mismatch, shown
from scope_rt.optional_packages import need

GLOBAL_WINDOW = 21
"""Latent frames that Self-Forcing's models see where their attention has no window."""
_NAMES: Mapping[str, str] = {
    "denoising_step_list": "denoising_steps",
    "denoising_step_list_first_chunk": "first_chunk_steps",
    "warp_denoising_step": "warp_steps",
    "num_frame_per_block": "frames_per_block",
}
"""Of entries that a recipe has under another name."""
ENTRIES = (*_NAMES, "model_kwargs", "adapter")
"""Those that a family may take."""
_FIX = "correct the entry, or copy the project's own file"


def read_project_config(paths: Iterable[Path]) -> dict[str, tuple[Path, Any]]:
    """The entries of those files that are there, each with the file that it is from.

    Raises:
        UserInputError: one cannot be read, or holds something else than plain values.
    """
    merged = dict[str, tuple[Path, Any]]()
    for path in paths:
        if path.is_file():
            merged |= {name: (path, value) for name, value in _plain(path).items()}
    return merged


def recipe_entries(
    given: Mapping[str, tuple[Path, Any]], taken: Collection[str]
) -> dict[str, tuple[str, Any]]:
    """Entries of a recipe, each after the file and the name that the project has it under.

    Args:
        given: what `read_project_config` read.
        taken: the names of those entries that count.
    """
    found = dict[str, tuple[str, Any]]()
    for name in taken:
        if name not in given:
            continue
        path, value = given[name]
        if name == "model_kwargs":
            found |= {
                entry: (f"{path}: {said}", each)
                for entry, (said, each) in _of_model(path, value).items()
            }
        elif name in _NAMES:
            if name.startswith("denoising_step_list") and _ends_clean(value):
                value = value[:-1]
            found[_NAMES[name]] = (f"{path}: {name}", value)
    return found


def _ends_clean(steps: Any) -> bool:
    """Whether a list ends with the clean pass, which no project's code takes for a step."""
    return isinstance(steps, list) and len(steps) > 1 and steps[-1] == 0


def _of_model(path: Path, kwargs: Any) -> dict[str, tuple[str, Any]]:
    """The arguments of the model's class."""
    if not isinstance(kwargs, dict):
        raise UserInputError(
            mismatch(f"{path}: model_kwargs", got=kwargs, want="names and values", fix=_FIX)
        )
    found = dict[str, tuple[str, Any]]()
    if "timestep_shift" in kwargs:
        found["shift"] = ("timestep_shift", kwargs["timestep_shift"])
    if kwargs.get("use_infinite_attention"):
        found["positions"] = ("use_infinite_attention", "in_window")
    if "local_attn_size" in kwargs or "sink_size" in kwargs:
        seen: Any = kwargs.get("local_attn_size", -1)
        sink: Any = kwargs.get("sink_size", 0)
        for name, size in (("local_attn_size", seen), ("sink_size", sink)):
            if not isinstance(size, int) or isinstance(size, bool) or size < -1:
                want = "a whole number"
                raise UserInputError(mismatch(f"{path}: {name}", got=size, want=want, fix=_FIX))
        seen = GLOBAL_WINDOW if seen == -1 else seen
        # The project's window has its sinks in it, a recipe's has them beside it.
        found["window_frames"] = ("local_attn_size", seen - sink)
        found["sink_frames"] = ("sink_size", sink)
    return found


def adapter_entries(given: Mapping[str, tuple[Path, Any]]) -> dict[str, Any]:
    """`rank` and `alpha` of the LoRA, where a file has them.

    Raises:
        UserInputError: they are no numbers.
    """
    if "adapter" not in given:
        return {}
    path, adapter = given["adapter"]
    found = {}
    for name in ("rank", "alpha"):
        value: Any = adapter.get(name) if isinstance(adapter, dict) else None
        if type(value) not in (int, float) or not 0 < value < inf:
            want = "a number above 0"
            raise UserInputError(
                mismatch(f"{path}: adapter: {name}", got=value, want=want, fix=_FIX)
            )
        found[name] = value
    return found


def _plain(path: Path) -> dict[str, Any]:
    need("yaml", purpose=f"the configuration {path.name}")
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserInputError(f"cannot read {path}: {first}; copy the project's own file") from error
    if not isinstance(raw, dict):
        got = shown(type(raw).__name__)
        raise UserInputError(mismatch(f"{path}", got=got, want="names and values", fix=_FIX))
    return raw
