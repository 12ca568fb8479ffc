"""`scope-rt serve`: the one folder that knows a web framework; it outlives the ranks it shows."""
