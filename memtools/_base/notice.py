"""Warnings about what must not end the program: a mistake of its own, or a failure in here."""

from __future__ import annotations

import logging
import sys
import warnings

from memtools._base.libraries import is_own
from memtools._base.text import shown_lines

logger = logging.getLogger("memtools")


def _harmless(record: logging.LogRecord) -> bool:
    """Escapes what a name of the program could do to a terminal."""
    record.msg, record.args = shown_lines(record.getMessage()), None
    return True


logger.addFilter(_harmless)


def notice(text: str) -> None:
    """A RuntimeWarning at the program's line that called this package. Where warnings are errors it
    goes to the log "memtools" instead: it may come where nothing may be raised."""
    text = shown_lines(text)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(f"memtools: {text}", RuntimeWarning, stacklevel=level)
    except RuntimeWarning:
        logger.warning("%s", text)
