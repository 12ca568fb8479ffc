"""Sequence caches: storage, codec and policy compose."""
