"""Sizes of sequence caches, pure: needs neither torch nor a model."""
