"""One version for the package, its logs and what ranks compare."""

__version__ = "0.1.0"
