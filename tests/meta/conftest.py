"""What goes for every test of a name, a callable or an argument: there are thousands of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _few_objects_to_visit() -> Iterator[None]:
    """Children collect garbage, and take a census: not of what pytest and other tests hold."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
