"""These tests need a real GPU. Without one they fail: a skipped test looks like a passed one."""

from __future__ import annotations

import pytest


def pytest_sessionstart() -> None:
    try:
        import torch

        found = torch.cuda.is_available()
        detail = f"torch {torch.__version__} finds none"
    except ImportError as error:
        found, detail = False, str(error)
    if not found:
        pytest.exit(f"tests/gpu needs a CUDA device: {detail}", returncode=1)
