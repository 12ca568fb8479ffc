"""What a project's own code computed from a prompt to pixels, computed again by a stream."""
