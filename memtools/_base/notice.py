"""What a program is told that made a mistake which must not end it."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_logger = logging.getLogger("memtools")


def notice(text: str, stacklevel: int = 2) -> None:
    """A RuntimeWarning, at the line that called the function that gives notice, or further up by a
    larger `stacklevel`. Where warnings are errors it goes to the log "memtools" instead: it may
    come where nothing may be raised."""
    try:
        warnings.warn(f"memtools: {text}", RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        _logger.warning("%s", text)


def callers() -> int:
    """Return the level of the line that called this package, for its caller's warnings.warn."""
    frame, level, here = sys._getframe(1), 1, os.path.dirname(os.path.dirname(__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    return level
