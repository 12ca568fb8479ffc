"""Text encoders: prompts in, conditioning embeddings out."""
