"""What every part of memtools builds on: torch's connection, sizes, text, decorators."""
