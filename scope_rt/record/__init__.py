"""The only place that knows how far a stream is."""
