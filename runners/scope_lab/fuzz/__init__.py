"""Bytes that no sender of ours would write, decoded and judged. Nothing at run time needs it."""
