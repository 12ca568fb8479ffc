"""Models that run on sequence caches."""
