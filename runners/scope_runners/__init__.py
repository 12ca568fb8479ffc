"""The commands: each turns what a person typed into a session, and its errors into one sentence."""
