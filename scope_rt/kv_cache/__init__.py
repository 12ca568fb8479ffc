"""KV caches of a stream."""
