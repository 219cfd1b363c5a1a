"""A torch that the shim was not built for."""

from __future__ import annotations

from typing import NoReturn


def older_torch() -> NoReturn:
    """In the place of memtools._base.torch.connect()."""
    raise ImportError("memtools needs a newer torch")
