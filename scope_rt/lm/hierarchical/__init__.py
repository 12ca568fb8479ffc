"""A long context is kept at several levels of detail, and an edit of it costs only what follows."""
