"""An hour of a live stream in which ranks die, and of which nothing may be lost."""
