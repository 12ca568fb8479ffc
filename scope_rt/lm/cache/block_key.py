"""Two blocks have equal keys only when every token up to their end is equal, and may be shared.

A key chains a hash over the key before it (Kwon et al., 2023, section 4.3; the chain is that of
vLLM's prefix cache), so a lookup costs one hash a block. A hash alone is not believed: equality
compares the tokens too, back to where both chains are one object.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack

Digest = Callable[[bytes], bytes]


def blake2b_16(content: bytes) -> bytes:
    """BLAKE2b, 16 bytes (RFC 7693)."""
    return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingScope:
    """Who may share blocks: only requests whose every field is equal."""

    domain: str
    """The specialist (model and weights) that computed them."""
    lora_revision: str = ""
    """Name *and revision* of the LoRA bundle; a bundle that is replaced must not find old rows."""
    salt: str = ""
    """Keeps tenants apart that must not learn from timing what others asked."""


class BlockKey:
    """The content of one full block and of everything before it."""

    __slots__ = ("digest", "parent", "scope", "tokens")

    def __init__(
        self,
        scope: SharingScope,
        parent: "BlockKey | None",
        tokens: tuple[int, ...],
        *,
        digest: Digest = blake2b_16,
    ) -> None:
        self.scope, self.parent, self.tokens = scope, parent, tokens
        before = (
            (scope.domain, scope.lora_revision, scope.salt) if parent is None else parent.digest
        )
        content = msgpack.packb((before, tokens), unicode_errors="surrogatepass")
        self.digest: bytes = digest(content)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine._own() != theirs._own():
                return False
            mine, theirs = mine.parent, theirs.parent
        self.parent = other.parent  # one chain from here on: comparing the next block is O(1)
        return True

    def _own(self) -> tuple[object, ...]:
        return self.digest, self.tokens, self.scope


def block_keys(
    tokens: Sequence[int],
    *,
    block_size: int,
    scope: SharingScope,
    known: Sequence[BlockKey] = (),
    digest: Digest = blake2b_16,
) -> list[BlockKey]:
    """The keys of all full blocks of `tokens`; a rest that fills no block has none.

    `known` are the keys of the first blocks, made before; only the others are computed.
    """
    keys = list(known)
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else None
        own = tuple(tokens[start : start + block_size])
        keys.append(BlockKey(scope, parent, own, digest=digest))
    return keys
