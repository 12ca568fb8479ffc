"""How much attention a run of keys receives, without keeping a probability for every key.

The mass of a group of keys for one query is the softmax over groups of their log-sum-exps, which is
the sum of its keys' probabilities (the merge of FlashAttention, Dao et al. 2022, section 3.1). It
is worked out beside whatever backend attends, in float32.
"""

import torch
from torch import Tensor

WORKSPACE_BYTES = 64 * 2**20
"""Most scores held at a time; more queries are taken in pieces."""


def mass_of_groups(q_BTHD: Tensor, k_BKHD: Tensor, *, group_tokens: int) -> Tensor:
    """Attention mass of every `group_tokens` consecutive keys, summed over batch, queries, heads.

    `[K / group_tokens]` in float32; all of it together is `B * T * H`.
    """
    q, k = q_BTHD.float().transpose(1, 2), k_BKHD.float().permute(0, 2, 3, 1)
    batch, heads, _, dim = q.shape
    query_bytes = batch * heads * k.shape[-1] * k.element_size()
    piece = max(1, WORKSPACE_BYTES // query_bytes)
    mass = q.new_zeros(k.shape[-1] // group_tokens)
    for some in q.split(piece, dim=2):
        scores = torch.matmul(some / dim**0.5, k)
        groups = scores.unflatten(-1, (-1, group_tokens)).logsumexp(-1)
        mass += groups.softmax(-1).sum((0, 1, 2))
    return mass
