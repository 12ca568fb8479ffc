"""The sizes of a Wan-architecture transformer, named as in diffusers' `config.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.config_file import read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalWanConfig:
    """Sizes of a causal Wan DiT; the patch is (1, 2, 2), q and k are normalised over all heads."""

    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    ffn_dim: int
    num_layers: int
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def heads_of_rank(self, tp_degree: int) -> int:
        """Heads of each rank; where they do not come out even, the last rank's end with zeros."""
        return -(-self.num_attention_heads // tp_degree)

    def cache_heads(self, tp_degree: int, cache: CacheChoice) -> int:
        """Heads in the caches of all ranks together, zeros that fill up the last one included.

        Raises:
            UserInputError: there are such zeros, which attend to all frames alike, and `cache` adds
                up what heads attend to.
        """
        if cache.kind is CacheKind.H2O and self.num_attention_heads % tp_degree:
            raise UserInputError(
                f"kv_cache {cache} adds up what heads attend to, and the model's "
                f"{self.num_attention_heads} heads are not shared evenly by tp {tp_degree}; use "
                "ring"
            )
        return self.heads_of_rank(tp_degree) * tp_degree

    def channels_of_rank(self, tp_degree: int) -> int:
        """Feed-forward channels of each rank, likewise."""
        return -(-self.ffn_dim // tp_degree)

    @property
    def degrees(self) -> list[int]:
        """TP degrees that leave each rank a head, and a feed-forward channel."""
        return [
            degree
            for degree in range(1, self.num_attention_heads + 1)
            if (degree - 1) * self.heads_of_rank(degree) < self.num_attention_heads
            and (degree - 1) * self.channels_of_rank(degree) < self.ffn_dim
        ]

    def check_degree(self, tp_degree: int) -> None:
        """Refuse a TP degree that leaves a rank without a head, or without a feed-forward channel.

        Raises:
            UserInputError: naming the degrees that work.
        """
        if tp_degree not in self.degrees:
            choices = ", ".join(map(str, self.degrees))
            raise UserInputError(
                f"tp {tp_degree} does not divide the model's {self.num_attention_heads} heads and "
                f"{self.ffn_dim} feed-forward channels so that each rank has some; choose one of "
                f"{choices}"
            )

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read `folder/config.json`, as diffusers writes it.

        Raises:
            UserInputError: the file is missing, is not JSON, lacks a size, or asks for a variant
                of Wan (image conditioning, another patch or norm) that this class does not compute.
        """
        path = folder / "config.json"
        raw = read_config(path, fix="point to a model folder")
        required = {
            "patch_size": [1, 2, 2],
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "image_dim": None,
            "added_kv_proj_dim": None,
        }
        for name, want in required.items():
            if raw.get(name, want) != want:
                raise UserInputError(f"{path}: {name} is {raw[name]!r}, supported is {want!r}")
        names = [field.name for field in fields(cls)]
        _check_sizes(path, raw, names)
        return cls(**{name: raw[name] for name in names if name in raw})

    @classmethod
    def from_original(cls, path: Path, *, text_dim: int) -> Self:
        """Read the `config.json` of Wan's own folder, which does not state `text_dim`.

        Raises:
            UserInputError: as `from_folder`.
        """
        raw = read_config(path, fix="copy the Wan folder again")
        if raw.get("model_type", "t2v") != "t2v":
            raise UserInputError(f"{path}: model_type is {raw['model_type']!r}, supported is 't2v'")
        _check_sizes(path, raw, [*_ORIGINAL, "eps"])
        dim, num_heads = raw["dim"], raw["num_heads"]
        if dim % num_heads:
            raise UserInputError(f"{path}: dim {dim} is no multiple of num_heads {num_heads}")
        sizes = {_ORIGINAL[name]: raw[name] for name in _ORIGINAL if _ORIGINAL[name]}
        eps = {"eps": raw["eps"]} if "eps" in raw else {}
        return cls(attention_head_dim=dim // num_heads, text_dim=text_dim, **sizes, **eps)

    def to_json(self) -> str:
        """The `config.json` that diffusers' `WanTransformer3DModel` reads as the same model."""
        raw = {
            "_class_name": "WanTransformer3DModel",
            "patch_size": [1, 2, 2],
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
        } | {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(raw, indent=2, sort_keys=True) + "\n"


_ORIGINAL: Mapping[str, str] = {
    "dim": "",
    "num_heads": "num_attention_heads",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "freq_dim": "freq_dim",
    "ffn_dim": "ffn_dim",
    "num_layers": "num_layers",
}
"""Wan's own name of a size -> diffusers', "" where that has none."""


def _check_sizes(path: Path, raw: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse sizes that are missing or no sizes. Raises UserInputError."""
    missing = [name for name in names if name not in raw and name != "eps"]
    if missing:
        raise UserInputError(f"{path} lacks {', '.join(missing)}; is this a Wan transformer?")
    for name in filter(raw.__contains__, names):
        kinds, want = ((int, float), "a number") if name == "eps" else ((int,), "a whole number")
        if type(raw[name]) not in kinds or not 0 < raw[name] < float("inf"):
            raise UserInputError(f"{path}: {name} is {raw[name]!r}, want {want} above 0")
