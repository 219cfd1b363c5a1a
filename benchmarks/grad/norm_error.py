"""How far norms are from the exact one: torch's on the CPU, and ours."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import memtools
from benchmarks.kit.harness import Json, table
from benchmarks.kit.limits import Limit, number_limit


def exact(grad: torch.Tensor) -> float:
    """In float64, a Mi elements at a time."""
    pieces = grad.view(-1).split(1 << 20)  # type: ignore[no-untyped-call]
    return math.sqrt(math.fsum(float(piece.double().square().sum()) for piece in pieces))


def cases(elements: int) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        f"{elements:,} normal": lambda: torch.randn(elements),
        f"{elements:,} equal": lambda: torch.full((elements,), 0.1),
        f"{elements:,} normal, bf16": lambda: torch.randn(elements).bfloat16(),
        "GPT-2's embedding, normal": lambda: torch.randn(50_257, 768),
        "1e6 of 1e25": lambda: torch.full((1_000_000,), 1e25),
        "1e6 of 1e-25": lambda: torch.full((1_000_000,), 1e-25),
    }


def norm_error(elements: int) -> list[Json]:
    rows = []
    for name, make in cases(elements).items():
        torch.manual_seed(0)
        grad = make()
        parameter = torch.empty_like(grad)
        parameter.grad = grad
        reference = exact(grad)
        theirs = float(torch.nn.utils.get_total_norm([grad]))
        ours = float(memtools.grad_norm([parameter]))
        rows.append(
            {
                "name": name,
                "exact": reference,
                "torch": theirs / reference - 1,
                "ours": ours / reference - 1,
            }
        )
    return rows


def show_norm_error(rows: list[Json]) -> None:
    header = ("relative error of the norm", "torch", "memtools.grad_norm")
    lines = ((row["name"], f"{row['torch']:+.1e}", f"{row['ours']:+.1e}") for row in rows)
    print(f"{table(header, lines)}\n", flush=True)


def norm_error_limits(rows: list[Json]) -> list[Limit]:
    worst = max(abs(row["ours"]) for row in rows)
    return [number_limit("error of the norm", 1e-7, "", worst, worst)]
