"""What goes into the blocks is what was planned, and what comes out of them becomes the latents.

Noise is drawn again, bit for bit; every call's input, timestep and text are those of the envelope;
its rotations, patch embedding, head and step are held against `edge_reference`. In `strict` that is
all of every chunk. In `default` it is one step's noise in every other chunk, what all calls are
given in one chunk of so many and in each with a recompute, and the rest of calls in turn
(`CallTurns`). Blocks are looked at elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scope_contracts.envelope import (
    CONTEXT_FRAMES_OVERRIDE,
    INPUT_LATENTS,
    LATENTS_IN,
    PPEnvelope,
)
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import CallPlan, CallTurns
from scope_rt.integrity.deviations import Comparison
from scope_rt.integrity.edge_reference import (
    Estimate,
    Projection,
    head_rows,
    mixed_input,
    next_input,
    noise_of,
    patches_of,
    rotation_table,
    sigma_of,
    timesteps_of,
)
from scope_rt.integrity.tolerance import Rounding
from scope_rt.models.causal_wan import Modulation, TextKV
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.recipe_choices import Positions

NOISE_EVERY = 2
"""In `default`, chunks to one of which a step's noise is drawn again: 0.2 % of a chunk each."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """What one generator call was given and gave; tensors are the model's own."""

    x: Tensor
    modulation: Modulation
    rope: Tensor
    text: Sequence[TextKV]
    entered: Tensor | None = None
    """The first block's input `[B, F, S, C]`."""
    left: Tensor | None = None
    """The last block's output."""
    flow: Tensor | None = None


class _Watch:
    """Keeps every call of one chunk, until it is dropped: two tensors of `[B, T, C]` for each of
    the calls `whole`, and what is smaller of all."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, whole: Sequence[int]) -> None:
        first, last = blocks[0], blocks[-1]
        self.calls: list[_Call] = []
        self.whole = whole
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            first.register_forward_pre_hook(self._entered),
            last.register_forward_hook(self._left),
            model.register_forward_hook(self._after),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept = {name: named[name] for name in ("modulation", "rope", "text")}
        self.calls.append(_Call(x=args[0], **kept))

    def _entered(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if len(self.calls) - 1 in self.whole:
            self.calls[-1].entered = args[0]

    def _left(self, block: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if len(self.calls) - 1 in self.whole:
            self.calls[-1].left = out

    def _after(self, model: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.calls[-1].flow = out


class EdgeCheck:
    """One generator rank's: `begin` before a chunk, `end` after it.

    Build it when the weights are loaded and verified: it keeps those of patch embedding and head.
    """

    def __init__(
        self, generator: ChunkGenerator, *, rank: int, checks: Checks, every: int = 1
    ) -> None:
        """`every` is the number of chunks to one whose calls are watched."""
        model = generator.model
        self._generator, self._rank, self._checks, self._every = generator, rank, checks, every
        self._rounding = Rounding.of(model.dtype)
        self._feedback, schedule = generator.feedback, generator.schedule
        self._sigma_of = partial(
            sigma_of, shift=schedule.shift, num_steps=schedule.num_train_timesteps
        )
        self._eps = model.config.eps
        patch, head = model.patch_embedding, model.proj_out
        assert patch.bias is not None
        self._patch = Projection(patch.weight, patch.bias, self._rounding)
        self._head = Projection(head_rows(head.weight), head_rows(head.bias), self._rounding)
        self._turns = CallTurns(every)
        self._own_noise: dict[int, Tensor] = {}
        """Of the chunk's steps whose turn it is."""
        self._watch: _Watch | None = None
        self._calls: list[_Call] = []

    def begin(
        self, envelope: PPEnvelope, tensors: Mapping[str, Tensor], plans: Sequence[CallPlan]
    ) -> None:
        """Watch the calls of the chunk, of which `plans` has one each; none where no call has its
        turn."""
        self.abandon()
        self._envelope, self._tensors, self._plans = envelope, tensors, plans
        # Now: rank0 has just drawn the start of this chunk; cold code takes ten times as long.
        shape = tuple(tensors[LATENTS_IN].shape)
        self._own_noise = {step: noise_of(envelope, step, shape) for step in self._steps_in_turn()}
        if envelope.do_kv_recompute or not envelope.chunk_index % self._every:
            model, has_recompute = self._generator.model, envelope.do_kv_recompute
            whole = self._turns.due(
                envelope.chunk_index, num_calls=len(plans), has_recompute=has_recompute
            )
            self._watch = _Watch(model, model.blocks, whole)

    def abandon(self) -> None:
        """Watch nothing any more, as after a chunk that failed."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def end(self, latents: Tensor) -> None:
        """Compare the chunk's noise, and what was watched, with what they must be.

        `latents` are the chunk's, on the CPU.

        Raises:
            IntegrityError: naming chunk, rank, call and stage.
        """
        chunk, is_strict = self._envelope.chunk_index, self._every == 1
        num_steps = len(self._envelope.denoising_step_list)
        with suspect_from(chunk if is_strict else chunk + 1 - NOISE_EVERY * num_steps):
            self._check_noise()
        watch = self._watch
        self.abandon()
        if self._envelope.clean_pass:
            with suspect_from(chunk):
                self._check_kept(latents)
        if watch is not None:
            self._calls = watch.calls
            num_in_turn = len(self._plans) - self._envelope.do_kv_recompute
            with suspect_from(chunk if is_strict else chunk + 1 - self._every * num_in_turn):
                self._check_calls(watch.whole, latents)
            self._calls = []

    def _check_calls(self, indices: Sequence[int], latents: Tensor) -> None:
        timesteps = timesteps_of(self._envelope)
        if len(self._calls) != len(timesteps):
            raise IntegrityError(
                f"{self._where}: the model ran {len(self._calls)} of {len(timesteps)} calls"
            )
        first = int(self._envelope.do_kv_recompute)
        steps = range(first, first + len(self._envelope.denoising_step_list))
        self._check_given(timesteps, steps, latents)
        self._check_rotations(indices)
        self._check_patches([index for index in indices if index < first])  # of other frames
        self._check_patches([index for index in indices if index >= first])
        self._check_head([index for index in indices if index in steps])
        for index in indices:
            if index in steps:
                self._check_step(index, index - first, latents)

    @property
    def _where(self) -> str:
        return f"chunk {self._envelope.chunk_index}, rank {self._rank}"

    @property
    def _comparison(self) -> Comparison:
        return Comparison(self._checks.edges, self._where)

    def _steps_in_turn(self) -> Sequence[int]:
        """Those whose noise is drawn again."""
        num = len(self._envelope.denoising_step_list)
        if self._every == 1 or not num:  # a start frame has none
            return range(num)
        turn, is_idle = divmod(self._envelope.chunk_index, NOISE_EVERY)
        return () if is_idle else (turn % num,)

    def _check_noise(self) -> None:
        """The chunk's start and its re-noise are what this rank draws by itself."""
        if not self._own_noise:
            return
        comparison, drawn = Comparison(self._checks.noise, self._where), self._generator.noise_drawn
        num = len(self._envelope.denoising_step_list)
        comparison.count("re-noise drawn", got=len(drawn), want=num - 1)
        for step, own in self._own_noise.items():
            got = drawn[step - 1] if step else self._tensors[LATENTS_IN]
            name = f"noise before step {step}" if step else LATENTS_IN
            comparison.same(-1, name, got, own.to(got.dtype))

    def _check_kept(self, latents: Tensor) -> None:
        """The clean pass, whose rows later chunks see, is of the latents that are shown."""
        seen = self._generator.last_input
        if seen is not None:
            shown = self._feedback(self._envelope.chunk_index, latents)
            last_call = self._envelope.expected_generator_calls - 1
            self._comparison.same(last_call, "input", seen, shown.to(seen.device))

    def _check_given(self, timesteps: Sequence[float], steps: range, latents: Tensor) -> None:
        """Every call has the modulation of its timestep and the text in effect; calls that are no
        step, and the first one, have the input that the envelope says."""
        inputs = {steps.start: self._tensors[LATENTS_IN]}
        if steps.start:
            inputs[0] = self._tensors[CONTEXT_FRAMES_OVERRIDE]
        modulations = self._generator.modulations
        for index, (call, timestep) in enumerate(zip(self._calls, timesteps, strict=True)):
            if index == steps.start and INPUT_LATENTS in self._tensors:
                self._check_mixed(index, call.x)
            elif index in inputs:
                self._comparison.same(index, "input", call.x, inputs[index].to(call.x.device))
            made = modulations.get(timestep, call.modulation)  # `MadeState` counts them
            if call.modulation is not made:
                name = f"modulation of timestep {timestep:g}"
                self._comparison.same(index, f"{name}, layers", call.modulation.layers, made.layers)
                self._comparison.same(index, f"{name}, head", call.modulation.head, made.head)
            is_recompute = index < steps.start
            text = self._generator.text_of_recompute if is_recompute else self._generator.text
            if call.text is not text:
                self._check_text(index, call.text, text)

    def _check_mixed(self, index: int, got: Tensor) -> None:
        """A chunk that is given pictures begins with them and its noise, by the first sigma."""
        given, noise = (self._tensors[name].to(got.device) for name in (INPUT_LATENTS, LATENTS_IN))
        value, error = mixed_input(
            given, noise, sigma=self._sigma(0), rounding=Rounding.of(got.dtype)
        )
        self._comparison.close([index], "input", got[None].double(), value[None], error)

    def _check_text(self, index: int, got: Sequence[TextKV], want: Sequence[TextKV]) -> None:
        self._comparison.count("layers of text K/V", got=len(got), want=len(want))
        for layer, (mine, theirs) in enumerate(zip(got, want, strict=False)):
            self._comparison.same(index, f"text keys of layer {layer}", mine.k, theirs.k)
            self._comparison.same(index, f"text values of layer {layer}", mine.v, theirs.v)

    def _check_rotations(self, indices: Sequence[int]) -> None:
        """Calls that share a table are looked at once."""
        head_dim = self._generator.cache.spec.head_dim
        first = {id(self._calls[index].rope): index for index in reversed(indices)}
        for index in first.values():
            got = torch.view_as_real(self._calls[index].rope[:, 0])
            roundoff = torch.finfo(got.dtype).eps / 2
            want = rotation_table(self._plans[index], head_dim, roundoff)
            if self._generator.positions is Positions.IN_WINDOW:  # the model turns nothing
                want = Estimate(torch.ones_like(want.value) * torch.tensor((1.0, 0.0)), want.error)
            value, error = (each.to(got.device) for each in want)
            self._comparison.close([index], "rotations", got[None], value[None], error)

    def _check_patches(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        x = self._stacked(indices, lambda call: call.x).to(self._generator.model.dtype)
        want = self._patch.of(patches_of(x).double())
        got = self._stacked(indices, lambda call: call.entered)
        self._comparison.close(indices, "patch embedding", got, *want)

    def _check_head(self, indices: Sequence[int]) -> None:
        """Of steps: what the other calls' heads give is not used."""
        if not indices:
            return
        left = self._stacked(indices, lambda call: call.left).double()
        heads = self._stacked(indices, lambda call: call.modulation.head).double()
        shift, scale = heads.flatten(2).unbind(1)  # a chunk's frames are alike
        want = self._head.of_normed(left.flatten(1, -2), scale, shift, eps=self._eps)
        got = patches_of(self._stacked(indices, lambda call: call.flow))
        self._comparison.close(indices, "head", got.flatten(1, -2), *want)

    def _check_step(self, index: int, step: int, latents: Tensor) -> None:
        """An Euler step and its noise make the next step's input, or the chunk."""
        call, drawn = self._calls[index], self._generator.noise_drawn
        noise, following, got = torch.zeros(()), 0.0, latents
        if step < len(drawn):
            noise, following, got = drawn[step], self._sigma(step + 1), self._calls[index + 1].x
        assert call.flow is not None
        value, error = next_input(
            call.x,
            call.flow,
            noise.to(call.x.device, call.x.dtype),
            sigma=self._sigma(step),
            following=following,
            rounding=Rounding.of(call.x.dtype),
        )
        if got.dtype is not call.x.dtype:  # a chunk is handed over in the dtype of the stream
            error = error + 1.01 * Rounding.of(got.dtype).stored * value.abs().max()
        self._comparison.close([index], "step", got.to(call.x.device)[None], value, error)

    def _sigma(self, step: int) -> float:
        return self._sigma_of(self._envelope.denoising_step_list[step])

    def _stacked(self, indices: Sequence[int], part: Callable[[_Call], Tensor | None]) -> Tensor:
        kept = [part(self._calls[index]) for index in indices]
        return torch.stack([each for each in kept if each is not None])
