"""A tiny language model that recalls facts, and what eviction makes it forget."""
