"""A Mamba-2 layer: a prompt is computed as a masked matrix product, a token as one recurrence step.

Dao & Gu (2024), "Transformers are SSMs": `h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`,
`y_t = C_t h_t + D x_t`. The two forms are one function (state-space duality), and either goes on
from a state that the other left. Parameter names are those of transformers' `Mamba2Mixer`.

Shape legend: B batch, T tokens, C model channels, H heads, P channels of a head, G groups of heads,
N state size, X = H*P + 2*G*N convolved channels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from scope_contracts.errors import CacheError, mismatch
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.specs.state_format import StateFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Sizes, named as in transformers' `Mamba2Config`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    layer_norm_epsilon: float = 1e-5

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner_size + 2 * self.n_groups * self.state_size

    def state_format(self, dtype: DType) -> StateFormat:
        """What a sequence costs in one layer, at any length."""
        return StateFormat.mamba2(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            num_groups=self.n_groups,
            conv_kernel=self.conv_kernel,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the recurrence is fed: `decay` is `dt * A <= 0`, `[B, T, H]`; groups are repeated."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    decay_BTH: Tensor
    b_BTHN: Tensor
    c_BTHN: Tensor


class GatedNorm(nn.Module):
    """RMS norm of `x * silu(gate)` within each group of channels."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.groups, self.eps = config.n_groups, config.layer_norm_epsilon
        self.weight = nn.Parameter(torch.ones(config.inner_size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        grouped = (x * F.silu(gate)).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return self.weight * normed


class Mamba2(nn.Module):
    """One layer; `forward` takes a span of any length and moves its state in a `StateCache`."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config = c = config
        self.in_proj = nn.Linear(c.hidden_size, c.inner_size + c.conv_dim + c.num_heads, bias=False)
        self.conv1d = nn.Conv1d(c.conv_dim, c.conv_dim, c.conv_kernel, groups=c.conv_dim)
        self.dt_bias = nn.Parameter(torch.zeros(c.num_heads))
        self.A_log = nn.Parameter(torch.zeros(c.num_heads))
        self.D = nn.Parameter(torch.ones(c.num_heads))
        self.norm = GatedNorm(c)
        self.out_proj = nn.Linear(c.inner_size, c.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, *, cache: StateCache, layer: int) -> Tensor:
        """The layer's output over the open span; every sequence takes all T tokens, or none.

        Raises `CacheError` where the span is another one: padding would go into the states.
        """
        num_tokens = x_BTC.shape[1]
        if cache.span is None or not set(cache.span) <= {0, num_tokens}:
            want = f"{num_tokens} tokens, or 0, of each sequence"
            fix = "feed ragged sequences in batches of equal lengths"
            raise CacheError(mismatch("the open span", got=cache.span, want=want, fix=fix))
        conv_BXK, ssm_BHPN = cache.state(layer)
        c = self.config
        gate, mixed, dt = self.in_proj(x_BTC).split([c.inner_size, c.conv_dim, c.num_heads], -1)
        padded = torch.cat([conv_BXK, mixed.transpose(1, 2)], dim=-1)
        inputs = self._inputs(F.silu(self.conv1d(padded)).transpose(1, 2), dt)
        run = recurrence_step if num_tokens == 1 else masked_product
        y_BTHP, ssm_BHPN = run(inputs, ssm_BHPN)
        cache.update(layer, padded[..., -(c.conv_kernel - 1) :], ssm_BHPN)
        y_BTHP = y_BTHP + self.D[:, None] * inputs.x_BTHP
        out: Tensor = self.out_proj(self.norm(y_BTHP.flatten(2), gate))
        return out

    def _inputs(self, convolved_BTX: Tensor, dt_BTH: Tensor) -> _Inputs:
        c = self.config
        grouped = c.n_groups * c.state_size
        x, b, out = convolved_BTX.split([c.inner_size, grouped, grouped], dim=-1)
        repeats = c.num_heads // c.n_groups
        b_BTHN, c_BTHN = (
            rearrange(part, "b t (g n) -> b t g n", g=c.n_groups).repeat_interleave(repeats, 2)
            for part in (b, out)
        )
        dt = F.softplus(dt_BTH + self.dt_bias)
        x_BTHP = rearrange(x, "b t (h p) -> b t h p", h=c.num_heads)
        return _Inputs(x_BTHP, dt, dt * -self.A_log.exp(), b_BTHN, c_BTHN)


def recurrence_step(inputs: _Inputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """One token, `T` of 1: outputs `[B, 1, H, P]` and the state behind it."""
    fed = einsum(inputs.dt_BTH, inputs.x_BTHP, inputs.b_BTHN, "b t h, b t h p, b t h n -> b h p n")
    state = inputs.decay_BTH[:, 0, :, None, None].exp() * state_BHPN + fed
    return einsum(state, inputs.c_BTHN, "b h p n, b t h n -> b t h p"), state


def masked_product(inputs: _Inputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """All T tokens at once: outputs `[B, T, H, P]` and the state behind them.

    Token t gets `exp(decay_{s+1} + ... + decay_t)` of what token s <= t fed, and of the state
    before all of them. Costs O(T^2); a long prompt is given in spans.
    """
    total_BHT = inputs.decay_BTH.transpose(1, 2).cumsum(-1)
    since = total_BHT[..., :, None] - total_BHT[..., None, :]
    causal = torch.ones(since.shape[-2:], dtype=torch.bool, device=since.device).tril()
    weight_BHTS = since.masked_fill(~causal, -torch.inf).exp()
    fed_BSHP = inputs.dt_BTH[..., None] * inputs.x_BTHP
    mix = weight_BHTS * einsum(inputs.c_BTHN, inputs.b_BTHN, "b t h n, b s h n -> b h t s")
    y = einsum(mix, fed_BSHP, "b h t s, b s h p -> b t h p")
    carried = einsum(
        total_BHT.exp(), inputs.c_BTHN, state_BHPN, "b h t, b t h n, b h p n -> b t h p"
    )
    remaining_BHS = weight_BHTS[..., -1, :]
    state = total_BHT[..., -1, None, None].exp() * state_BHPN + einsum(
        remaining_BHS, fed_BSHP, inputs.b_BTHN, "b h s, b s h p, b s h n -> b h p n"
    )
    return y + carried, state
