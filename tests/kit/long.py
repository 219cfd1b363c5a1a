"""How much `make fuzz` does of what `make test` does a part of."""

from __future__ import annotations

from hypothesis import settings

#: `make fuzz` runs other cases each time, and more of them, by the hypothesis profile `random`
LONG = not settings.default.derandomize
