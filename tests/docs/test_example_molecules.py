"""molecule_gnn.py: the usual loop runs out of memory at the largest molecule, memtools does not."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MOLECULES, UPDATE = 72, 64


@pytest.fixture(scope="module")
def gnn() -> Any:
    spec = importlib.util.spec_from_file_location("molecule_gnn", EXAMPLES / "molecule_gnn.py")
    assert spec is not None
    assert spec.loader is not None
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as for a script: what measures is in a file beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both variants, run by the demo under the limit that is the default."""
    out = tmp_path_factory.mktemp("molecules") / "demo.json"
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--only", "molecule_gnn"]
    command += ["--json", str(out), "--report", str(out.with_suffix(".html")), "--"]
    command += ["--molecules", str(MOLECULES), "--valid", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(out.read_text())["molecule_gnn"], "printed": done}


@pytest.mark.slow
def test_the_allocator_ends_the_usual_loop_at_the_largest_molecule(ended: dict[str, Any]) -> None:
    naive = ended["naive"]
    assert naive["ended"].startswith("out of memory in update ")
    assert re.search("DefaultCPUAllocator: can't allocate memory|bad_alloc", naive["report"])
    assert naive["valid_loss"] is None
    assert naive["ended"] in ended["printed"].stderr


@pytest.mark.slow
def test_memtools_finishes_with_smaller_parts_and_the_same_update(ended: dict[str, Any]) -> None:
    ours = ended["memtools"]
    assert ours["ended"] == "finished"
    assert "Out of memory: " in ours["report"]
    assert re.search(r"went on with [\d,]+ rows", ours["report"])
    assert [update["molecules"] for update in ours["made_of"]] == [UPDATE, MOLECULES - UPDATE]
    assert {(update["scale"], update["spread"]) for update in ours["made_of"]} == {(1.0, 1.0)}
    assert 0 < ours["valid_loss"] < 10


@pytest.mark.slow
def test_the_demo_tells_who_got_to_the_end(ended: dict[str, Any]) -> None:
    said = ended["printed"].stdout
    update = ended["naive"]["ended"].removeprefix("out of memory in update ")
    assert f"the usual loop: Out of memory in update {update}, under a limit of 128 MiB" in said
    assert f"GradAccumulator: Finished all {len(ended['memtools']['losses'])} updates" in said


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


@pytest.mark.slow
def test_every_pair_of_a_molecule_is_there_both_ways_and_no_other(gnn: Any) -> None:
    graph = gnn.collate(molecules(gnn, 3, 2))
    pairs = set(zip(graph.sender.tolist(), graph.receiver.tolist(), strict=True))
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)}
    double = graph.pair[:, -gnn.BONDS + 2] == 1
    bonded = zip(graph.sender[double].tolist(), graph.receiver[double].tolist(), strict=True)
    assert set(bonded) == {(0, 1), (1, 0), (3, 4), (4, 3)}


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


def test_what_was_tried_in_vain_is_not_counted(gnn: Any) -> None:
    meter = gnn.BatchMeter(gnn.argparse.Namespace(progress=False), 1, gnn.ACCUMULATION_STEPS)
    meter.after_batch("A", 1.0, 10)
    meter.after_batch("B", 5.0, 30)  # did not fit: again in two
    meter.after_batch("B", 2.0, 10)
    meter.after_batch("C", 3.0, 20)
    meter.record(atoms=40, molecules=5)
    assert meter.losses == [(1.0 * 10 + 2.0 * 10 + 3.0 * 20) / 40]


def test_an_update_of_means_tells_how_its_atoms_are_weighted(gnn: Any) -> None:
    meter = gnn.BatchMeter(gnn.argparse.Namespace(progress=False), 1, gnn.ACCUMULATION_STEPS)
    meter.after_batch("A", 1.0, 10)
    meter.after_batch("B", 1.0, 40)
    meter.after_update(5)
    assert meter.updates[0]["scale"] == 2 / gnn.ACCUMULATION_STEPS
    assert meter.updates[0]["spread"] == 4.0
