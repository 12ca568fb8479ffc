"""`scope-rt model inspect`: what a folder is, how it would be streamed, and what a rank needs.

All that a load checks is checked, from headers: what could not be streamed is refused here too.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.tensor_spec import DType
from scope_rt.models.family import Family, family_names
from scope_rt.models.loading import ModelFolder
from scope_rt.tensor_files.listing import listing_of
from scope_runners.parts import register_parts
from scope_runners.plan_memory.plan import shown_size
from scope_runners.plan_memory.presets import video_model_of
from scope_runners.plan_memory.request import requirement_of
from scope_runners.wording import printable

_DTYPES = (DType.FLOAT32, DType.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What is told of a model; file names are relative to its folder, memory is in bytes."""

    folder: str
    family: str
    settings_from: list[str]
    """Files of the folder whose values come before the family's."""
    settings_not_from: list[str]
    """Others of the project's own configuration, of which nothing counts."""
    looks_like: list[str]
    """Other families, whose projects publish such files."""
    recipe: dict[str, Any]
    transformer: dict[str, Any]
    lora: str | None
    vae: str
    vae_dtypes: list[str]
    """Of its weights as they are stored; `[model] codec_dtype` says in which it computes."""
    text_encoder: str
    text_dtypes: list[str]
    memory: list[dict[str, Any]]
    """Of the fullest rank, by plan, TP degree and dtype."""


def run_inspect(namespace: argparse.Namespace) -> int:
    """Print the report; returns the exit code.

    Raises:
        UserInputError: it could not be streamed; the sentence names what is wrong.
    """
    register_parts(namespace.parts)
    model = ModelFolder.open(namespace.folder, namespace.recipe)
    model.check_parts()
    report = report_of(model)
    print(json.dumps(asdict(report), indent=2) if namespace.json else _table(report), flush=True)
    return 0


def run_recipes(namespace: argparse.Namespace) -> int:
    """Print the names of the families that come with the package, or the file of one."""
    if namespace.folder is None:
        print("\n".join(family_names()))
    else:
        print(Family.named(namespace.folder).to_toml(), end="")
    return 0


def report_of(model: ModelFolder) -> ModelReport:
    """What is known of a model from its headers. Raises UserInputError."""

    def name_of(path: Path) -> str:
        return path.relative_to(model.path).as_posix()

    layout, tensors = model.layout, list(model.weights.tensors.values())
    return ModelReport(
        folder=str(model.path),
        family=layout.family.name,
        settings_from=[name_of(path) for path in layout.family.sources],
        settings_not_from=[name_of(path) for path in layout.family.uncounted(model.path)],
        looks_like=list(layout.looks_like),
        recipe=asdict(model.recipe),
        transformer={
            "files": [name_of(path) for path, _ in model.weights.by_file()],
            "state_dict": layout.state_dict,
            "dtypes": _named(each.dtype for each in tensors),
            "num_weights": sum(prod(each.shape) for each in tensors),
            **asdict(model.config),
        },
        lora=None if model.lora is None else name_of(model.lora.path),
        vae=name_of(layout.vae),
        vae_dtypes=_dtypes_in(layout.vae),
        text_encoder=name_of(layout.text_encoder),
        text_dtypes=_dtypes_in(layout.text_encoder),
        memory=list(_memory(model)),
    )


def _dtypes_in(part: Path) -> list[str]:
    """Of all tensors of a file, or of the files of a folder."""
    states = listing_of(part).states
    return _named(form.dtype for state in states for form in state.tensors.values())


def _named(dtypes: Iterable[torch.dtype]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})


def _memory(model: ModelFolder) -> Iterator[dict[str, Any]]:
    sizes = video_model_of(model)
    degrees = {PlanId.SINGLE: 1, PlanId.PP0: 1, PlanId.PP1: 1}
    if len(model.config.degrees) > 1:
        degrees[PlanId.TP_V1_1] = model.config.degrees[1]
    for plan, tp in degrees.items():
        for dtype in _DTYPES:
            ranks = requirement_of(sizes, plan_id=plan, tp=tp, dtype=dtype).rank_memory()
            fullest = max(ranks, key=lambda part: part.plan.num_bytes)
            yield {
                "plan": str(plan),
                "tp": tp,
                "dtype": str(dtype),
                "rank": fullest.role,
                "bytes": fullest.plan.num_bytes,
                "not_counted": list(fullest.plan.unknown),
            }


def _table(report: ModelReport) -> str:
    transformer = report.transformer
    settings = ", ".join(report.settings_from) or "the family alone"
    unread = [f"{each} has none that count" for each in report.settings_not_from]
    dtypes, key = ", ".join(transformer["dtypes"]), transformer["state_dict"]
    where = ", ".join(transformer["files"]) + (f": {key}" if key else "")
    rows = {
        "family": report.family + "".join(f"; looks like {each}" for each in report.looks_like),
        "settings from": "; ".join([settings, *unread]),
        "transformer": f"{where} ({transformer['num_weights']:,} weights, {dtypes})",
        "LoRA": report.lora or "none",
        "VAE": f"{report.vae} ({', '.join(report.vae_dtypes)})",
        "text encoder": f"{report.text_encoder} ({', '.join(report.text_dtypes)})",
    }
    lines = [f"{name:<14} {text}" for name, text in rows.items()]
    lines += [f"  {name:<26} {_value(value)}" for name, value in report.recipe.items()]
    lines.append("memory of the fullest rank, at the recipe's size")
    for each in report.memory:
        lacks = f", without {', '.join(each['not_counted'])}" if each["not_counted"] else ""
        plan = f"{each['plan']} --tp {each['tp']}"
        lines.append(f"  {plan:<16} {each['dtype']:<9} {shown_size(each['bytes']):>12}{lacks}")
    return "\n".join(map(printable, lines))


def _value(value: object) -> object:
    return ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else value


def check_arguments(namespace: argparse.Namespace) -> None:
    """Refuse what only other actions take. Raises UserInputError."""
    if namespace.write:
        raise UserInputError(f"--write belongs to verify, not to {namespace.action}; leave it out")


ACTIONS: Mapping[str, Any] = {"inspect": run_inspect, "recipes": run_recipes}
