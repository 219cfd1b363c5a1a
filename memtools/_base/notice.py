"""Warnings about a mistake of the program that must not end it."""

from __future__ import annotations

import logging
import os
import sys
import warnings

logger = logging.getLogger("memtools")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def notice(text: str, stacklevel: int = 2) -> None:
    """A RuntimeWarning, at the line that called the function that gives notice, or further up by a
    larger `stacklevel`. Where warnings are errors it goes to the log "memtools" instead: it may
    come where nothing may be raised."""
    try:
        warnings.warn(f"memtools: {text}", RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        logger.warning("%s", text)


def callers() -> int:
    """The `stacklevel` of the program's line that called this package, for a warning or a notice
    that the caller of this function gives."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
