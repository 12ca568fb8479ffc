"""What passed in blocks of one call, as sums and lengths of each token's numbers.

All tensors of a kind are stacked, so that one product makes the sums of them all.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.call_weights import LOCAL, REDUCED, STREAM, BlockWeights, CallColumns, Seen
from scope_rt.models.causal_wan import Modulation, TextKV


class TokenSums(NamedTuple):
    """Of R blocks: of the audit's N tokens, or of all T where it says so; K sums by columns of
    `CallColumns`."""

    local_RSKN: Tensor
    """Of `LOCAL` but the last two."""
    turned_RSN: Tensor
    """Of queries and keys, by signs that are turned as they must be."""
    lengths_RSHN: Tensor
    """Of `LOCAL`, by head."""
    heads_RHKN: Tensor
    """Of what attention gave, by head."""
    text_scores_RBHLN: Tensor
    stream_RSKN: Tensor
    stream_lengths_RSN: Tensor
    given_RSKT: Tensor
    """Of `REDUCED`, all tokens."""
    given_lengths_RST: Tensor
    got_RSKT: Tensor
    got_lengths_RST: Tensor
    up_RKN: Tensor
    up_length_RN: Tensor
    activation_RKN: Tensor


def token_sums(
    records: Sequence[BlockRecord],
    weights: BlockWeights,
    made: Mapping[float, Modulation],
    texts: Sequence[TextKV],
) -> TokenSums:
    """Of consecutive layers of one call; `made` and `texts` are the generator's.

    Takes memory for seven tensors of each block, in the dtype that sums are taken in.
    """
    first, batch, timestep = records[0], records[0].audit.batch, records[0].plan.timestep
    layers = slice(first.audit.layer, first.audit.layer + len(records))
    columns = weights.of_call(timestep, made[timestep]).columns
    keys_RBHLD = weights.of_text(texts).keys_RBHLD[layers]
    keys_RBHLD = keys_RBHLD if batch is None else keys_RBHLD[:, batch : batch + 1]
    local, turned, lengths, heads, scores = _of_heads(records, weights, columns, layers, keys_RBHLD)
    given = got = _of_reduced(records, [each.seen for each in records], weights, columns, layers)
    if first.got:
        got = _of_reduced(records, [each.got for each in records], weights, columns, layers)
    stream = _stream(records, weights, layers)
    stream_sums = (columns.stream_SLKC[:, layers] @ stream.mT).transpose(0, 1)
    stream_lengths = torch.linalg.vector_norm(stream, dim=-1).transpose(0, 1)
    up = _stacked(records, [[each.seen[Seen.UP] for each in records]], weights)[0]
    up_sums, up_length = weights.up_signs_KC @ up.mT, torch.linalg.vector_norm(up, dim=-1)
    activation = columns.activation_LKC[layers] @ _gelu(up, weights).mT
    return TokenSums(
        local,
        turned,
        lengths,
        heads,
        scores,
        stream_sums,
        stream_lengths,
        *given,
        *got,
        up_sums,
        up_length,
        activation,
    )


def _of_heads(
    records: Sequence[BlockRecord],
    weights: BlockWeights,
    columns: CallColumns,
    layers: slice,
    keys_RBHLD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    signs_TC, num, shape = records[0].turned_signs_TC, len(LOCAL) - 2, records[0].seen[Seen.Q].shape
    tensors = [[each.seen[what] for each in records] for what in LOCAL]
    rows = _stacked(records, tensors, weights, num_channels=shape[2] * shape[3])
    by_head = rows.unflatten(-1, shape[2:])
    by_token = rows[num:].reshape(-1, *signs_TC.shape)
    space = weights.workspace.like(tuple(by_token.shape), by_token, 1)
    turned = torch.mul(by_token, signs_TC, out=space).sum(-1).view(2, len(records), -1)
    text_q = by_head[LOCAL.index(Seen.TEXT_Q_PRODUCT)].unflatten(1, (keys_RBHLD.shape[1], -1))
    attended = by_head[LOCAL.index(Seen.ATTENTION)] @ weights.head_signs_DK
    return (
        (columns.local_SLKC[:, layers] @ rows[:num].mT).transpose(0, 1),
        turned.transpose(0, 1),
        torch.linalg.vector_norm(by_head, dim=-1).permute(1, 0, 3, 2),
        attended.permute(0, 2, 3, 1),
        keys_RBHLD @ text_q.permute(0, 1, 3, 4, 2),
    )


def _of_reduced(
    records: Sequence[BlockRecord],
    found: Sequence[Mapping[Seen, Tensor]],
    weights: BlockWeights,
    columns: CallColumns,
    layers: slice,
) -> tuple[Tensor, Tensor]:
    tensors = [[each[what] for each in found] for what in REDUCED]
    rows = _stacked(records, tensors, weights, of_all=bool(records[0].got))
    sums = columns.reduced_SLKC[:, layers] @ rows.mT
    return sums.transpose(0, 1), torch.linalg.vector_norm(rows, dim=-1).transpose(0, 1)


def _stream(records: Sequence[BlockRecord], weights: BlockWeights, layers: slice) -> Tensor:
    """What text attention adds is added here, in the dtype that sums are taken in."""
    step = Seen.TEXT_PROJECTED
    tensors = [
        [each.got.get(step, each.seen[step]) for each in records]
        if what is Seen.AFTER_TEXT
        else [each.seen[what] for each in records]
        for what in STREAM
    ]
    rows = _stacked(records, tensors, weights)
    after = rows[STREAM.index(Seen.AFTER_TEXT)].add_(weights.bias_after_text_LC[layers, None])
    after += rows[STREAM.index(Seen.AFTER_ATTENTION)]
    return rows


def _stacked(
    records: Sequence[BlockRecord],
    tensors_SR: Sequence[list[Tensor]],
    weights: BlockWeights,
    *,
    num_channels: int = 0,
    of_all: bool = False,
) -> Tensor:
    """The audit's rows, or those of all tokens, `[S, R, N, C]`, in the workspace, until its next
    use."""
    row, first = records[0].row, tensors_SR[0][0]
    tensors = [each for of_one in tensors_SR for each in of_one]
    width = num_channels or first.shape[-1]
    if row is not None and not of_all:
        shape: tuple[int, ...] = (1, width)
        tensors = [_row_of(each, row, width) for each in tensors]
    else:
        shape = tuple(first.shape)
        tensors = [each if each.shape == shape else each.reshape(shape) for each in tensors]
    space = weights.workspace.like((len(tensors), *shape), weights.head_signs_DK, 0)
    stacked = torch.stack(tensors, out=space)
    return stacked.view(len(tensors_SR), len(records), -1, width)


def _row_of(x: Tensor, row: int, width: int) -> Tensor:
    """One of the rows of as many numbers, `[1, width]`; in one step where they lie in order."""
    if x.is_contiguous():
        return x.as_strided((1, width), (width, 1), x.storage_offset() + row * width)
    return x.reshape(-1, width)[row : row + 1]


_GELU_CUBIC = 0.044715
_GELU_FACTOR = 2 * (2 / math.pi) ** 0.5


def _gelu(x: Tensor, weights: BlockWeights) -> Tensor:
    """Hendrycks and Gimpel (2016), section 2; (1 + tanh y) / 2 is the sigmoid of 2 y."""
    y = torch.mul(x, x, out=weights.workspace.like(tuple(x.shape), x, 1))
    y.mul_(_GELU_FACTOR * _GELU_CUBIC).add_(_GELU_FACTOR)
    return y.mul_(x).sigmoid_().mul_(x)
