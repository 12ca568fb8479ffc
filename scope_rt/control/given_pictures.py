"""What the next chunk begins with is asked for when it is planned, and not before."""

from scope_rt.control.planner import Planner
from scope_rt.control.stages import Stages
from scope_rt.control.video_input import InputEncoder, InputLatents, VideoInput
from scope_rt.tensors import TORCH_DTYPES


class GivenPictures:
    """Of one stream; costs nothing where it has no source."""

    def __init__(self, stages: Stages) -> None:
        self.source: VideoInput | None = None
        self._stages = stages
        self._encoder: InputEncoder | None = None

    def next(self, planner: Planner, *, hard_cut: bool) -> InputLatents | None:
        """Of the chunk that `planner` plans next; None begins it with noise alone.

        Blocks for what the codec takes.

        Raises:
            UserInputError: the pictures cannot be used.
        """
        stages, settings = self._stages, planner.settings
        if self.source is None or stages.input_encoder is None or not planner.takes_pictures:
            return None
        if self._encoder is None:
            self._encoder = stages.input_encoder()
        starts_epoch = planner.begins_epoch(hard_cut=hard_cut)
        pictures = self.source.newest(self._encoder.num_frames(starts_epoch=starts_epoch))
        if pictures is None:
            return None
        return self._encoder.encode(
            pictures,
            starts_epoch=starts_epoch,
            dtype=TORCH_DTYPES[stages.geometry.dtype],
            size=(settings.height, settings.width),
        )
