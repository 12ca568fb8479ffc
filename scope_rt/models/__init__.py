"""Causal video diffusion transformers, their recipes, and how checkpoints become them."""
