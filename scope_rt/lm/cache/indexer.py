"""A sparse-attention indexer keeps small keys of its own and names the rows worth attending to.

DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, section 2.1): `I(t, s) = sum_j w(t, j) *
relu(q(t, j) . k(s))` over the indexer's heads j; a query attends to its `top_k` best rows s only.
The keys live in a cache apart from K/V or latents: `ContiguousCache` with `indexer_format`.
"""

import torch
from einops import einsum
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import Plane, RowFormat
from scope_contracts.tensor_spec import DType


def indexer_format(*, dim: int, dtype: DType) -> RowFormat:
    """One key of `dim` channels a token, shared by all index heads: every rank holds it whole."""
    key = Plane(name="index_key", heads=1, dim=dim, head_sharded=False)
    return RowFormat(planes=(key,), dtype=dtype)


def select_rows(
    q_BTJD: Tensor,
    weights_BTJ: Tensor,
    keys_BKD: Tensor,
    *,
    positions_BK: Tensor,
    query_positions_BT: Tensor,
    top_k: int,
) -> Tensor:
    """The rows each query attends to, int64 `[B, T, min(top_k, K)]`; -1 for none.

    `keys_BKD` are the rows of one layer's view, `positions_BK` their positions. A query sees rows
    of its own position and before; of equal scores the earlier row wins. With `top_k` of K or
    more, attention over the selection is dense attention.

    Raises:
        UserInputError: `top_k` is below 1.
    """
    if top_k < 1:
        raise UserInputError(mismatch("top_k", got=top_k, want="at least 1", fix="2048 is usual"))
    affinity = einsum(q_BTJD, keys_BKD, "b t j d, b k d -> b t j k").relu()
    scores = einsum(weights_BTJ, affinity, "b t j, b t j k -> b t k")
    visible = (positions_BK[:, None] >= 0) & (
        positions_BK[:, None] <= query_positions_BT[..., None]
    )
    hidden = scores.masked_fill(~visible, -torch.inf)
    best = hidden.sort(dim=-1, descending=True, stable=True).indices
    rows = best[..., :top_k]
    return rows.where(visible.gather(-1, rows), -1)


def mask_of(rows_BTN: Tensor, num_rows: int) -> Tensor:
    """Which of `num_rows` rows each query attends to: bool `[B, T, num_rows]`."""
    batch, tokens, _ = rows_BTN.shape
    mask = torch.zeros(batch, tokens, num_rows + 1, dtype=torch.bool, device=rows_BTN.device)
    return mask.scatter_(-1, rows_BTN.where(rows_BTN >= 0, num_rows), True)[..., :num_rows]
