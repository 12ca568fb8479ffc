"""The shape of every tensor of a chunk follows from these numbers and the picture size."""

from dataclasses import dataclass

from scope_contracts.tensor_spec import DType

PATCH_SIZE = 2
"""Latent cells per token along height and along width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGeometry:
    """What a model fixes about a stream's tensors; height and width come with each envelope.

    `frames_per_block` and `context_frames` count latent frames, `spatial_stride` is pixels per
    latent cell, `text_len` tokens, `text_dim` channels. `context_frames` is the most that a
    recompute is given. A cache that holds `rollout_frames` begins anew with `rollout_overlap` of
    them; 0 for one that has no such end. Of a stream with a `start_frame`, chunk 0 is a picture
    that is given as latents, and not denoised.
    """

    batch: int = 1
    latent_channels: int
    frames_per_block: int
    spatial_stride: int = 8
    text_len: int
    text_dim: int
    dtype: DType
    context_frames: int
    rollout_frames: int = 0
    rollout_overlap: int = 0
    start_frame: bool = False

    @property
    def pixel_multiple(self) -> int:
        """Height and width in pixels must be multiples of this: stride x patch."""
        return self.spatial_stride * PATCH_SIZE

    @property
    def conditioning_shape(self) -> tuple[int, ...]:
        """`(batch, text_len, text_dim)`."""
        return (self.batch, self.text_len, self.text_dim)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """`(batch, frames_per_block, channels, height / stride, width / stride)`, from pixels."""
        return self._latents(self.frames_per_block, height, width)

    def context_shape(self, height: int, width: int, *, start_frame: int) -> tuple[int, ...]:
        """`(batch, frames, channels, height / stride, width / stride)`, from pixels.

        A chunk that starts early in its epoch has only `start_frame` frames before it; with
        rollouts, those of its own rollout.
        """
        num_frames = min(self.context_frames, start_frame)
        if 0 < self.rollout_frames <= start_frame:
            later = start_frame - self.rollout_frames
            period = self.rollout_frames - self.rollout_overlap
            num_frames = self.rollout_overlap + later % period
        return self._latents(num_frames, height, width)

    def _latents(self, num_frames: int, height: int, width: int) -> tuple[int, ...]:
        rows, columns = height // self.spatial_stride, width // self.spatial_stride
        return (self.batch, num_frames, self.latent_channels, rows, columns)
