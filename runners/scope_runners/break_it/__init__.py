"""`scope-rt break-it`: every fault we know of, on real ranks, and what came of it."""
