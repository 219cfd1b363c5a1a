"""What a program is told that made a mistake which must not end it."""

from __future__ import annotations

import logging
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
