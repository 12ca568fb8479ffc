"""Several calls of blocks at once: what they left, and what follows from weights and texts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.call_weights import LOCAL, REDUCED, BlockWeights, Seen
from scope_rt.integrity.token_sums import TokenSums
from scope_rt.models.causal_wan import Modulation, TextKV


class BlockSums:
    """Of R records of as many tokens. Those are of all batch rows, or the audit's one."""

    def __init__(
        self,
        weights: BlockWeights,
        records: Sequence[BlockRecord],
        found: Sequence[TokenSums],
        made: Mapping[float, Modulation],
        texts: Sequence[TextKV],
    ) -> None:
        """`found` are the records', in their order; `made` and `texts` are the generator's."""
        self.records, self.weights = records, weights
        numbers, batch = [each.audit.layer for each in records], records[0].audit.batch
        calls = tuple((each.audit.layer, each.plan.timestep) for each in records)
        self.bounds = weights.bounds_of(calls, made)
        self.products, self.text = weights.products, weights.of_text(texts).of_batch(batch)
        if numbers != list(range(weights.num_layers)):
            layers = torch.tensor(numbers, device=weights.device)
            self.products, self.text = self.products.at(layers), self.text.at(layers)
        self.of = found[0]
        if len(found) > 1:
            self.of = TokenSums(*(torch.cat(list(each)) for each in zip(*found, strict=True)))
        self.given, self.got = self.own(self.of.given_RSKT), self.own(self.of.got_RSKT)
        self.got_lengths = self.own(self.of.got_lengths_RST)
        by_token_RSNH = self.of.lengths_RSHN.transpose(2, 3).contiguous()  # 15 times as fast
        lengths = torch.linalg.vector_norm(by_token_RSNH, dim=-1)
        self.lengths: dict[Seen, Tensor] = {Seen.UP: self.of.up_length_RN}
        self.lengths |= zip(LOCAL, lengths.unbind(1), strict=True)
        self.lengths |= zip(REDUCED, self.own(self.of.given_lengths_RST).unbind(1), strict=True)
        """`[R, N]`."""
        self.sums: dict[Seen, Tensor] = {Seen.UP: self.of.up_RKN}
        self.sums |= zip(LOCAL, self.of.local_RSKN.unbind(1), strict=False)
        self.sums |= zip(REDUCED, self.given.unbind(1), strict=True)
        """`[R, K, N]`."""

    def own(self, of_all_tokens: Tensor) -> Tensor:
        """The audit's; where there are no other ranks, there may be no more."""
        row = self.records[0].row
        if row is None or of_all_tokens.shape[-1] == 1:
            return of_all_tokens
        return of_all_tokens[..., row : row + 1]

    def lengths_by_head(self, what: Seen) -> Tensor:
        """`[R, B, H, N]`."""
        lengths_RHN = self.of.lengths_RSHN[:, LOCAL.index(what)]
        (num, heads, _), batch = lengths_RHN.shape, self.text.keys_RBHLD.shape[1]
        return lengths_RHN.view(num, heads, batch, -1).transpose(1, 2)

    def squares(self, number: int, index: int) -> Tensor:
        """Of all tokens: given (`index` 0) or got (1), of q and k (`number` 0) or of the text's q,
        `[R, projections, T]`."""
        made = torch.stack([each.squares[number][index] for each in self.records])
        return made.flatten(2).to(self.weights.dtype)
