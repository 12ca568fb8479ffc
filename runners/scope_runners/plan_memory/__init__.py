"""`scope-rt plan-memory`: what a rank needs, and what to change."""
