"""What rank0's loop is given: the ranks behind it, and what a chunk passes on rank0 itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.envelope import PPEnvelope, PPResult
from scope_contracts.geometry import ChunkGeometry
from scope_rt.control.context import Context
from scope_rt.control.start_frame import StartFrame
from scope_rt.control.video_input import InputEncoder
from scope_rt.integrity.pictures import PictureCheck
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.models.noise import NoiseSource


class MeshPort(Protocol):
    """The generator ranks as rank0 sees them: what goes in comes out in the same order."""

    def submit(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        """Hand over one chunk's plan.

        Blocks while the chunk is generated where rank0 is a generator rank, else until the message
        before the last has left (`group_timeout_s` at most).

        Raises:
            LinkError: a rank was lost; where rank0 generates, also what its worker raises.
        """
        ...

    def collect(self) -> tuple[PPResult, dict[str, Tensor]]:
        """The result of the oldest chunk that was submitted, and its tensors.

        Blocks until it is there, `group_timeout_s` at most, or until a rank falls silent
        (`heartbeat_timeout_s`).

        Raises:
            LinkError: a rank was lost or gave no answer in time; it is named where it is known.
            ContractError: what came is not the result of this chunk.
        """
        ...

    def shutdown(self, envelope: PPEnvelope) -> None:
        """Tell all ranks to end; blocks until that has left, `group_timeout_s` at most.

        Raises:
            LinkError: a rank was lost.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRules:
    """`latent_limit` is the recipe's."""

    latent_limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What a chunk passes on rank0 beside the mesh, and the shapes they agree on."""

    mesh: MeshPort
    context: Context
    noise: NoiseSource
    geometry: ChunkGeometry
    cache: KVCacheSpec
    start_frame: Callable[[], StartFrame] | None = None
    """What chunk 0 is, where the stream begins with a picture; encoded when it is first asked."""
    input_encoder: Callable[[], InputEncoder] | None = None
    """Makes what encodes pictures that chunks begin with."""
    feedback: Feedback = own_latents
    values: ValueRules | None = None
    """What latents must be; None verifies neither them nor what rank0 keeps."""
    pictures: PictureCheck | None = None
    """Verifies what the decoder makes of them; None does not."""
    verify_within: int = 1
    """M: a chunk is verified with the M - 1 after it; 1 is when it is shown."""
    verify_survivors: Callable[[], tuple[int, ...]] = tuple
    """After a loss: as `Rank.verify_survivors`."""
