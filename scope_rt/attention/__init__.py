"""Attention backends: one dense reference, one small file per backend."""
