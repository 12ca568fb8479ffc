"""Rank0: what to do next is decided here, and only here."""
