"""The progress of a command that takes seconds: one line on a terminal, which goes at the end."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType

from memtools._base.text import shown


class Progress:
    """Writes what the command does now over what it did before. Nothing is written to a pipe."""

    def __enter__(self) -> Progress:
        self._is_seen = sys.stderr is not None and sys.stderr.isatty()
        return self

    def __call__(self, text: str) -> None:
        """Show a text; only as much of it as fits into one line."""
        self._write(shown(f"{text} ..."))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._is_seen:
            width = shutil.get_terminal_size().columns - 1  # A longer one could not be erased.
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()
