"""`memtools run`: who is named for each kind of thing that a loop keeps, at which rate, with which
advice. The rates are known by what is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.runs import execute, run, write

LOOP = """
    import torch
    torch.set_num_threads(1)

    def halves(batch):
        half = batch * 0.5
        yield half.sum()
        yield half.mean()

    def failed(batch):
        try:
            raise ValueError("a bad sample")
        except ValueError as error:
            return error

    kept, samples = [], [None] * 500
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i in range(120):
        batch = torch.randn(128, 64)
        loss = model(batch).exp().square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        stream = halves(batch)
        next(stream)
        KEEP
"""
BATCH = 128 * 64 * 4


class Kind(NamedTuple):
    keep: str
    grades: tuple[str, ...]
    holder: str
    kind: str
    rate: float
    advice: str


KINDS = {
    "losses with their graphs": Kind(
        # the batch, what exp() gave and square() took, and the nodes
        "kept.append({'loss': loss})", ("growing", "likely"),
        "autograd graphs in train.kept", "autograd graph",
        2 * BATCH + 5000, "x.detach() for a tensor",
    ),
    "generators": Kind(
        "kept.append(stream)", ("growing", "likely"),
        "list train.kept", "list", 2 * BATCH + 1500, "clear it",
    ),
    "exceptions": Kind(
        "kept.append(failed(batch))", ("growing", "likely"),
        "list train.kept", "exceptions", BATCH + 1500, "str(error)",
    ),
    "numbers": Kind(
        "kept.append([float(n) for n in range(1000)])", ("growing", "likely"),
        "list train.kept", "list", 1000 * (32 + 8), "clear it",
    ),
    "what is filled in": Kind(
        "samples[i * 7 % 500] = batch", ("fills",),
        "list train.samples", "list", BATCH + 460, "",  # It fits.
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_a_loop_keeps_is_named_with_its_rate(kind: Kind, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write(tmp_path, LOOP.replace("KEEP", kind.keep))
    lines = run(tmp_path, "train.py").stderr.decode().splitlines()
    explain = [sys.executable, "-m", "memtools", "explain", "--json"]
    (leak,) = json.loads(execute(explain, tmp_path).stdout)["leaks"]
    assert (leak["holder"], leak["kind"]) == (kind.holder, kind.kind)
    assert leak["grade"] in kind.grades
    assert leak["rate_bytes"] == pytest.approx(kind.rate, rel=0.2)
    assert kind.advice in (leak["advice"] or "")
    assert bool(kind.advice) == bool(leak["advice"])
    assert any(kind.holder in line for line in lines)
