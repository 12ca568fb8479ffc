"""Text K/V and modulations are right when they are made, which digests of them cannot know.

Both are made rarely, and used for many chunks. What the linear layers took and gave meanwhile is
held against sums of the weights that were loaded; what lies between them is computed again in
float64. What a generator uses and nobody saw made is refused, at both levels of integrity.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scope_contracts.arithmetic import LAMBDA, ReducedSum
from scope_contracts.envelope import CONDITIONING_EMBEDS, RECOMPUTE_EMBEDS, PPEnvelope
from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.deviations import Comparison
from scope_rt.integrity.edge_reference import timesteps_of
from scope_rt.integrity.linear_sums import LinearSums, length
from scope_rt.integrity.reduced_sums import ReducedPair
from scope_rt.integrity.tolerance import SHARED, SQUARES_ROUNDOFF, Rounding
from scope_rt.models.causal_wan import Block, Modulation, TextKV
from scope_rt.models.generator import ChunkGenerator


@dataclass(frozen=True, slots=True)
class _Product:
    """What a linear layer took and gave, `[..., n]`."""

    x: Tensor
    y: Tensor


@dataclass(slots=True)
class _Watch:
    """Keeps the products of linear layers by name, in the order in which they came."""

    linears: Mapping[str, nn.Linear]
    products: dict[str, list[_Product]] = field(default_factory=dict)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def start(self) -> None:
        self.products = {name: [] for name in self.linears}
        self._handles = [
            linear.register_forward_hook(_keeper(self.products[name]))
            for name, linear in self.linears.items()
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _keeper(kept: list[_Product]) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    return lambda linear, args, out: kept.append(_Product(args[0], out))


class MadeState:
    """One generator rank's: `begin` before a chunk, `end` after it, then `report`.

    Build it when the weights are loaded and verified: it remembers their sums.
    """

    def __init__(self, generator: ChunkGenerator, *, rank: int, checks: Checks) -> None:
        model, embedder = generator.model, generator.model.condition_embedder
        self._generator, self._rank, self._checks = generator, rank, checks
        self._rounding = Rounding.of(model.dtype)
        self._blocks = [block for block in model.blocks if isinstance(block, Block)]
        text, time = embedder.text_embedder, embedder.time_embedder
        of_text = {"text in": text.linear_1, "text out": text.linear_2}
        for layer, block in enumerate(self._blocks):
            of_text |= {f"to_k of layer {layer}": block.attn2.to_k}
            of_text |= {f"to_v of layer {layer}": block.attn2.to_v}
        of_time = {"time in": time.linear_1, "time out": time.linear_2}
        of_time |= {"time_proj": embedder.time_proj}
        self._text_watch, self._time_watch = _Watch(of_text), _Watch(of_time)
        self._sums = {
            name: LinearSums.of([each], dtype=torch.float64)
            for name, each in (of_text | of_time).items()
        }
        self._norms = [block.attn2.norm_k.weight.detach().double() for block in self._blocks]
        tables = [block.scale_shift_table[0] for block in self._blocks]
        self._tables = torch.stack(tables).detach().double()
        self._head_table = model.scale_shift_table[0].detach().double()
        self._text: Sequence[TextKV] = ()
        self._modulations: dict[float, Modulation] = {}
        self._new_text: Tensor | None = None
        self._text_before: Tensor | None = None
        """That of a recompute, where it is made anew."""
        self._new_times: list[float] = []
        self._chunk = 0
        self._reduced: list[ReducedSum] = []

    def begin(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        """Watch what the chunk will make, if anything."""
        self.abandon()
        self._chunk = envelope.chunk_index
        self._new_text = tensors[CONDITIONING_EMBEDS] if envelope.reset_crossattn_cache else None
        self._text_before = tensors.get(RECOMPUTE_EMBEDS)
        made = self._generator.modulations
        self._new_times = [
            each for each in dict.fromkeys(timesteps_of(envelope)) if each not in made
        ]
        if self._new_text is not None:
            self._text_watch.start()
        if self._new_times:
            self._time_watch.start()

    def abandon(self) -> None:
        """Watch nothing any more, as after a chunk that failed."""
        self._text_watch.stop()
        self._time_watch.stop()

    def end(self) -> None:
        """Compute again what was made, and refuse what was made otherwise.

        Raises:
            IntegrityError: naming chunk, rank, tensor and stage.
        """
        self.abandon()
        self._reduced = []
        with suspect_from(self._chunk):
            self._check_text()
            self._check_modulations()

    def report(self) -> tuple[ReducedSum, ...]:
        """Of the last chunk's text, for `Checks.reduced_sums`; empty in a group of one."""
        return tuple(self._reduced)

    @property
    def _comparison(self) -> Comparison:
        return Comparison(self._checks.made, where=f"chunk {self._chunk}, rank {self._rank}")

    def _check_text(self) -> None:
        text = self._generator.text
        if self._new_text is None:
            if len(text) != len(self._text) or not all(map(is_, text, self._text)):
                self._comparison.count("text K/V made for the chunk", got=1, want=0)
            return
        self._text, products = tuple(text), self._text_watch.products
        made = {"text": (self._new_text, text)}
        if self._text_before is not None:
            before = self._text_before, self._generator.text_of_recompute
            made = {"text before": before, **made}
        self._count_products(products, len(made))
        for number, (name, (embeds, of_layers)) in enumerate(made.items()):
            if all(len(found) > number for found in products.values()):
                once = {linear: found[number] for linear, found in products.items()}
                self._check_made(name, embeds, of_layers, once)

    def _check_made(
        self, name: str, embeds: Tensor, text: Sequence[TextKV], once: Mapping[str, _Product]
    ) -> None:
        """Every layer's K/V of one text."""
        comparison, given = self._comparison, once["text in"].x
        embeds = embeds.to(self._generator.cache.device, self._generator.model.dtype)
        comparison.same(-1, "conditioning_embeds", given, embeds.reshape(given.shape))
        middle = _gelu(once["text in"].y.double(), self._rounding)
        self._check_close("GELU of the text", once["text out"].x, *middle)
        embedded = once["text out"].y
        for layer, made in enumerate(text):
            k, v = once[f"to_k of layer {layer}"], once[f"to_v of layer {layer}"]
            for given in (k.x, v.x):
                comparison.same(-1, f"{name} for layer {layer}", given, embedded)
            comparison.same(-1, f"{name} values of layer {layer}", made.v, v.y.view_as(made.v))
            self._check_keys(f"{name} keys of layer {layer}", layer, made.k, k.y)
        self._check_products(once)

    def _check_keys(self, name: str, layer: int, made: Tensor, product: Tensor) -> None:
        """RMS norm over all heads of all ranks; what the others add follows from the keys."""
        got, want = made.flatten(-2).double(), product.double()
        dim, eps = self._generator.model.config.dim, self._generator.model.config.eps
        squares = want.square().sum(-1, keepdim=True)
        want = want * self._norms[layer]
        group, total = self._generator.model.group, squares
        if group.size > 1:
            scale = (got * want).sum(-1, keepdim=True) / want.square().sum(-1, keepdim=True)
            total = dim * (scale.pow(-2) - eps)
            pair = ReducedPair.of(squares).with_result(total)
            # The scale is stored once for all keys of a token, and its square is off by twice that.
            roundoff = max(3 * self._rounding.stored, 8 * SQUARES_ROUNDOFF)
            pair = ReducedPair(pair.given, pair.length, roundoff, pair.got)
            self._reduced.append(pair.on_host(f"sum of squares of {name}"))
        want *= (total / dim + eps).rsqrt()
        off = 3 * self._rounding.store + LAMBDA * dim**0.5 * SQUARES_ROUNDOFF
        self._check_close(name, got, want, off * want.abs())

    def _check_modulations(self) -> None:
        made, new = self._generator.modulations, self._new_times
        others = [time for time, each in made.items() if self._modulations.get(time) is not each]
        if not (others or new):
            return
        self._comparison.count("modulations made for the chunk", got=len(others), want=len(new))
        self._modulations = dict(made)
        products = self._time_watch.products
        self._count_products(products, len(new))
        for time, first, second, proj in zip(
            new, products["time in"], products["time out"], products["time_proj"], strict=False
        ):
            if time in made:
                self._check_modulation(time, made[time], first, second, proj)

    def _check_modulation(
        self, time: float, made: Modulation, first: _Product, second: _Product, proj: _Product
    ) -> None:
        name, rounding = f"modulation of timestep {time:g}", self._rounding
        wave = _sinusoid(time, first.x.shape[-1]).to(first.x.device)
        bound = 1.01 * rounding.stored * wave.abs() + 2.0**-50 * (1 + time)
        self._check_close(f"sinusoid of timestep {time:g}", first.x, wave, bound)
        self._check_close(f"{name}, SiLU", second.x, *_silu(first.y.double(), rounding))
        e = second.y.double()
        self._check_close(f"{name}, second SiLU", proj.x, *_silu(e, rounding))
        self._check_products({"time in": first, "time out": second, "time_proj": proj})
        by_row = proj.y.double().unflatten(-1, (6, -1)).movedim(-2, 0)[..., None, :]
        layers = self._tables[:, :, None, None, None] + by_row
        self._check_close(f"{name}, layers", made.layers, layers, rounding.store * layers.abs())
        head = self._head_table[:, None, None, None] + e[:, :, None]
        self._check_close(f"{name}, head", made.head, head, rounding.store * head.abs())

    def _count_products(self, products: Mapping[str, Sequence[_Product]], want: int) -> None:
        for name, found in products.items():
            self._comparison.count(f"products of {name}", got=len(found), want=want)

    def _check_products(self, products: Mapping[str, _Product]) -> None:
        for name, product in products.items():
            x, y = (each.flatten(0, -2).double()[None] for each in (product.x, product.y))
            sums = self._sums[name]
            got = (sums.signs_KR @ y.mT)[:, None]
            want = (sums.sums_LKC @ x.mT)[:, None] + sums.bound.bias_sums_LPK1
            bound = sums.bound.of(got=got, y=length(y), x=length(x), rounding=self._rounding)
            self._check_close(f"sum of {name}", got, want, bound)

    def _check_close(self, stage: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
        got = got.double()[None]
        self._comparison.close(
            [-1], stage, got, want.reshape(got.shape), bound.expand_as(want).reshape(got.shape)
        )


def _sinusoid(time: float, num_channels: int) -> Tensor:
    """Cosines, then sines, of `time` at rates from 1 down to nearly 10,000^-1 (DDPM)."""
    half = num_channels // 2
    angles = time * torch.logspace(0, -4, half + 1, dtype=torch.float64)[:half]
    return torch.cat((angles.cos(), angles.sin()))


def _gelu(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Hendrycks and Gimpel (2016), section 2, by tanh; and how far off it may be."""
    inner = (2 / torch.pi) ** 0.5 * x * (1 + 0.044715 * x * x)
    value = 0.5 * x * (1 + inner.tanh())
    return value, rounding.store * value.abs() + SHARED * rounding.work * x.abs()


def _silu(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The same work, section 4."""
    value = x / (1 + (-x).exp())
    return value, rounding.store * value.abs() + SHARED * rounding.work * x.abs()
