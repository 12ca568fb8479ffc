"""What is measured: the published models at 480x832, and a model as small as a test needs."""

from dataclasses import dataclass

import torch

from scope_rt.models.config import CausalWanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one run of the bench."""

    models: dict[str, CausalWanConfig]
    side: tuple[int, int]
    """Rows and columns of a latent frame's cells."""
    windows: tuple[int, ...]
    """Latent frames that a chunk sees, itself included."""
    text_len: int
    matrix: int
    """Rows and columns of a product that shows the device's ceiling."""
    copy_bytes: int
    repeats: int

    @property
    def frame_tokens(self) -> int:
        return self.side[0] * self.side[1] // 4


def _wan(layers: int, heads: int, ffn_dim: int, head_dim: int = 128) -> CausalWanConfig:
    return CausalWanConfig(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=16,
        out_channels=16,
        text_dim=4096 if head_dim == 128 else 32,
        freq_dim=256,
        ffn_dim=ffn_dim,
        num_layers=layers,
    )


REAL = Sizes(
    models={"wan-1.3b": _wan(30, 12, 8960), "krea-14b": _wan(40, 40, 13_824)},
    side=(60, 104),
    windows=(6, 12, 21),
    text_len=512,
    matrix=8192,
    copy_bytes=1 << 30,
    repeats=20,
)
TINY = Sizes(
    models={"tiny": _wan(2, 2, 64, head_dim=24)},
    side=(4, 4),
    windows=(6,),
    text_len=4,
    matrix=64,
    copy_bytes=1 << 16,
    repeats=2,
)
SIZES = {"real": REAL, "tiny": TINY}


def device_named(name: str) -> torch.device:
    """The GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
