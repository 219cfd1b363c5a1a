"""molecule_gnn.py: the usual loop runs out of memory at the largest molecule, memtools does not."""

import json
import re
from typing import Any

import pytest
import torch

from tests.docs.test_examples import execute, load

MOLECULES, UPDATE = 72, 64


@pytest.fixture(scope="module")
def gnn() -> Any:
    return load("molecule_gnn")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both variants, run by the demo under the limit that is the default."""
    folder = tmp_path_factory.mktemp("molecules")
    options = ["--only", "molecule_gnn", "-o", str(folder), "--"]
    done = execute("demo.py", *options, "--molecules", str(MOLECULES), "--valid", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {
        way: json.loads((folder / f"molecule_gnn-{way}.json").read_text())
        for way in ("naive", "memtools")
    }
    return {**results, "printed": done.stdout}


@pytest.mark.slow
def test_the_allocator_ends_the_usual_loop_at_the_largest_molecule(ended: dict[str, Any]) -> None:
    naive = ended["naive"]
    assert naive["ended"].startswith("out of memory in update ")
    assert re.search("DefaultCPUAllocator: can't allocate memory|bad_alloc", naive["report"])
    assert naive["valid_loss"] is None
    assert naive["ended"] in ended["printed"]


@pytest.mark.slow
def test_memtools_finishes_with_smaller_parts_and_the_same_update(ended: dict[str, Any]) -> None:
    ours = ended["memtools"]
    assert ours["ended"] == "finished"
    assert "Out of memory: " in ours["report"]
    assert re.search(r"continued with [\d,]+ rows", ours["report"])
    assert [update["molecules"] for update in ours["made_of"]] == [UPDATE, MOLECULES - UPDATE]
    assert {(update["scale"], update["spread"]) for update in ours["made_of"]} == {(1.0, 1.0)}
    assert 0 < ours["valid_loss"] < 10


@pytest.mark.slow
def test_the_demo_reports_how_far_each_variant_got(ended: dict[str, Any]) -> None:
    said = ended["printed"].splitlines()
    update = ended["naive"]["ended"].removeprefix("out of memory in update ")
    assert f"  usual loop: out of memory in update {update}" in said
    assert "  GradAccumulator: finished" in said
    (remark,) = (line for line in said if line.startswith("  GradAccumulator: Update "))
    assert re.search(r"ran out of memory as well, and went on with at most [\d,]+ atoms", remark)


def molecules(gnn: Any, *sizes: int) -> list[Any]:
    chance = torch.Generator().manual_seed(0)
    return [
        gnn.Molecule(
            f"M{i}",
            torch.randint(gnn.ELEMENTS, (n,), generator=chance),
            3 * torch.randn(n, 3, generator=chance),
            torch.tensor([[0, 1, 2]]),
        )
        for i, n in enumerate(sizes)
    ]


def test_parts_hold_so_many_atoms_or_one_molecule(gnn: Any) -> None:
    parts = gnn.by_atoms(molecules(gnn, 6, 3, 20, 1, 9, 2), 10)
    assert [[len(one.element) for one in part] for part in parts] == [[6, 3], [20], [1, 9], [2]]


@pytest.mark.slow
def test_the_loss_of_molecules_is_the_sum_of_each(gnn: Any) -> None:
    batch = molecules(gnn, 6, 3, 20)
    model = gnn.Network()
    model.standardise(batch)
    total, atoms = gnn.loss_of(model, batch, "sum")
    parts = [gnn.loss_of(model, [one], "sum") for one in batch]
    assert atoms == sum(count for _, count in parts) == 29
    torch.testing.assert_close(total, torch.stack([loss for loss, _ in parts]).sum())
