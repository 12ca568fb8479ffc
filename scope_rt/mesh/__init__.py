"""The ranks: who does what, how they talk, and what each does with an envelope."""
