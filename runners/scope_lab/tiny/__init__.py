"""The embedded model's world, training and measurement; nothing at run time needs it."""
