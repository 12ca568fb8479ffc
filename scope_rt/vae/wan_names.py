"""Weights of Wan's VAE in the original naming load as the same model under diffusers' names."""

import re

_RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.", ".down_blocks."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Original part of a name -> diffusers' part, applied in order."""
_UPSAMPLE = re.compile(r"\.upsamples\.(\d{1,3})\.")


def diffusers_name(name: str, *, num_res_blocks: int) -> str:
    """The diffusers name of one original parameter.

    The original counts the decoder's layers through; diffusers counts stages, each of
    `num_res_blocks` + 1 blocks and what makes the frames larger.
    """
    for original, renamed in _RENAMES:
        name = re.sub(original, renamed, name)

    def place(found: re.Match[str]) -> str:
        stage, layer = divmod(int(found[1]), num_res_blocks + 2)
        inner = f"resnets.{layer}" if layer <= num_res_blocks else "upsamplers.0"
        return f".up_blocks.{stage}.{inner}."

    return _UPSAMPLE.sub(place, name)
