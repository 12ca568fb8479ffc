"""Video codecs: frames to latents and back, one chunk at a time."""
