"""What the project measures, trains and proves with; not part of the wheel."""
