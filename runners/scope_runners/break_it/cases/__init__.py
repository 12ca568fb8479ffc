"""The faults: one file for each kind of thing that breaks."""
