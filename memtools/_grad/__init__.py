"""Gradient accumulation: windows, precision, norms, back-off, undo, split, ranks."""
