"""The leak test: a verdict from readings of memory."""
