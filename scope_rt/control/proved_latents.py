"""The SHA-256 of a chunk's latents is computed once; the same bytes are known again for less.

XXH3 reads them in a tenth of the time. It finds damage, not forgery, and nobody forges a chunk
between its arrival and its consumer in one process.
"""

from hashlib import sha256

from xxhash import xxh3_64_intdigest

Bytes = bytes | memoryview


class ProvedLatents:
    """Of the chunk that arrived last."""

    def __init__(self) -> None:
        self._sha256, self._digest = "", 0

    def prove(self, latents: Bytes) -> str:
        """Compute the SHA-256, in hexadecimal."""
        self._digest = xxh3_64_intdigest(latents)  # first: what changes after it is in one of both
        self._sha256 = sha256(latents).hexdigest()
        return self._sha256

    def sha256_of(self, latents: Bytes, *, noted: str) -> str:
        """The same; computed only where these are not the bytes of which `noted` was proved."""
        if noted == self._sha256 and xxh3_64_intdigest(latents) == self._digest:
            return noted
        return sha256(latents).hexdigest()
