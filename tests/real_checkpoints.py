"""Tiny checkpoints in the formats that people have, with what their own code computed from them."""

import json
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

CHECKPOINTS = Path(os.environ.get("SCOPE_TEST_CHECKPOINTS", Path(__file__).parent / "checkpoints"))
"""Another folder of the same form is tested with the variable; see the README in ours."""
SELF_FORCING = CHECKPOINTS / "self-forcing"
GENERATOR = "checkpoints/self_forcing_dmd.pt"
"""Of Self-Forcing's folder."""
FASTVIDEO = CHECKPOINTS / "fastvideo-diffusers"
LONGLIVE = CHECKPOINTS / "longlive"
KREA = CHECKPOINTS / "krea-14b"
ORIGINAL_VAE = SELF_FORCING / "wan_models/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"
ORIGINAL_TEXT = ORIGINAL_VAE.with_name("models_t5_umt5-xxl-enc-bf16.pth")
ORIGINAL_TOKENIZER = ORIGINAL_VAE.parent / "google/umt5-xxl/tokenizer.json"

_MISSING = [
    name for name in ("diffusers", "ftfy", "tokenizers", "transformers") if not find_spec(name)
]
NEEDS_WAN = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")
"""Marks what loads Wan's parts. To import what they need takes seconds of every worker of tests,
and most of them run none of this: tests import it themselves."""


def copied(source: Path, into: Path) -> Path:
    """A copy of a checkpoint's folder in `into`, without its recordings."""
    ignored = shutil.ignore_patterns("*.rollout.*", "tokenizer_cases.json")
    return shutil.copytree(source, into / source.name, ignore=ignored)


def keep_generator(folder: Path, **states: str) -> None:
    """Write the generator of a copy of Self-Forcing's folder under these keys, with these
    prefixes."""
    path = folder / GENERATOR
    weights = torch.load(path, weights_only=True)["generator_ema"]
    torch.save(
        {
            key: {name.replace("model.", prefix, 1): each for name, each in weights.items()}
            for key, prefix in states.items()
        },
        path,
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """What a project's own code computed from the checkpoint beside it."""

    path: Path

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def details(self) -> Path:
        return self.path.with_suffix(".json")

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.path)

    def part(self, in_diffusers: str, original: str) -> Path:
        """A part of the checkpoint, in whichever of the two layouts it has."""
        if (path := self.folder / in_diffusers).exists():
            return path
        return next(self.folder.glob(f"wan_models/*/{original}"))

    def vae(self) -> Path:
        return self.part("vae", "Wan2.1_VAE.pth")

    def text_encoder(self) -> Path:
        return self.part("text_encoder", "models_t5_umt5-xxl-enc-bf16.*")

    def prompts(self) -> list[str]:
        """In the order of the tensors' rows."""
        details = json.loads(self.details.read_text())
        return list(details["prompts"]) if "prompts" in details else [details["prompt"]]

    def __str__(self) -> str:
        return f"{self.folder.name}-{self.path.name.partition('.')[0]}"


RECORDINGS = [Recording(path) for path in sorted(CHECKPOINTS.glob("*/*.rollout.safetensors"))]
of_each_recording = pytest.mark.parametrize("recording", RECORDINGS, ids=str)
