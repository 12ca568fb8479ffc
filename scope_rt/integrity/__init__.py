"""Evidence that what is held and what is computed is right."""
