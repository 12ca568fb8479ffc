"""Files of tensors: what lies in them by name, and any of it on demand. No code in one is run."""
