"""Which block sizes a kernel reads through a block table is a property of the kernel.

FlashAttention-2 takes multiples of 256, FlashAttention-3 any size, and the dense kernels that come
with torch none: for those, rows of scattered blocks are gathered first.
"""

from dataclasses import dataclass

from scope_contracts.errors import UserInputError, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSupport:
    """What one kernel makes of a block table."""

    kernel: str
    block_multiple: int | None
    """It reads blocks of this many tokens, or of a multiple; None: it takes no block table."""

    def reads(self, block_size: int) -> bool:
        """Whether blocks of `block_size` tokens are read where they lie."""
        return self.block_multiple is not None and block_size % self.block_multiple == 0

    def require(self, block_size: int) -> None:
        """Refuse a block size that would be gathered.

        Raises:
            UserInputError: the kernel does not read such blocks in place.
        """
        if self.block_multiple is None:
            raise UserInputError(
                f"{self.kernel} reads no block table, so no block size is read in place; allow "
                "gathering, or run flash-attn"
            )
        if not self.reads(block_size):
            want = f"a multiple of {self.block_multiple} for {self.kernel}"
            fix = f"use {self.block_multiple}, or allow gathering"
            raise UserInputError(mismatch("block size", got=block_size, want=want, fix=fix))


DENSE = PageSupport(kernel="torch's dense attention", block_multiple=None)
FLASH_2 = PageSupport(kernel="FlashAttention-2", block_multiple=256)
FLASH_3 = PageSupport(kernel="FlashAttention-3", block_multiple=1)
