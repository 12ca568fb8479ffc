"""Frames become packets once per rendition, and any number of viewers get them."""
