"""What one GPU gives this runtime, told in one call of bounded length."""
