"""Language models on the caches: the one package that knows transformers (extra `lm`)."""
