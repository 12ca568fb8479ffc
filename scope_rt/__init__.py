"""scope-rt: a distributed runtime for streaming video diffusion transformers."""

__version__ = "0.1.0"
