"""How much attention a run of keys receives, without keeping a probability for every key.

The mass of a group of keys for one query is the softmax over groups of their log-sum-exps, which is
the sum of its keys' probabilities (the merge of FlashAttention, Dao et al. 2022, section 3.1). It
is worked out beside whatever backend attends, in float32, head by head: that costs the products of
queries and keys a second time (half of what attention costs), and memory for `WORKSPACE_BYTES` of
scores and one head's queries and keys.
"""

import torch
from torch import Tensor

WORKSPACE_BYTES = 64 * 2**20
"""Most scores held at a time; more queries are taken in pieces."""


def mass_of_groups(q_BTHD: Tensor, k_BKHD: Tensor, *, group_tokens: int) -> Tensor:
    """Attention mass of every `group_tokens` consecutive keys, summed over batch, queries, heads.

    `[K / group_tokens]` in float32; all of it together is `B * T * H`.
    """
    batch, num_keys, heads, dim = k_BKHD.shape
    piece = max(1, WORKSPACE_BYTES // (batch * num_keys * torch.float32.itemsize))
    mass = torch.zeros(num_keys // group_tokens, device=k_BKHD.device)
    for head in range(heads):
        k_BDK = k_BKHD[:, :, head].float().transpose(1, 2)
        for q_BTD in q_BTHD[:, :, head].split(piece, dim=1):
            scores = torch.matmul(q_BTD.float() / dim**0.5, k_BDK)
            groups = scores.unflatten(-1, (-1, group_tokens)).logsumexp(-1)
            mass += groups.softmax(-1).sum((0, 1))
    return mass
