"""A graph network that predicts the elements of real molecules, of any size, from positions.

The molecules are those of the wwPDB's Chemical Component Dictionary (`molecules.py`). The network
sees distances and bonds; every pair of atoms of a molecule sends messages both ways, so that memory
goes with the square of its size. Most have some 25 atoms. The largest of the dictionary, the
tungstate wheel P8 W48 O184, has 240, and takes what 75 usual ones take.

In the usual loop, an update has a number of batches and a batch a number of molecules: the loss of
each batch is a mean, divided by their number; empty_cache() is called at every 10th batch; and the
last update, which is shorter, is scaled as if it were full. The batch with the wheel ends that run
under a limit (`--limit`, which is enforced) that all others stay well below. With memtools
(`memtools 1` to `6` below) an update is cut by numbers of atoms, into smaller parts if necessary,
and its gradient is the mean over its atoms:

    python examples/molecule_gnn.py --memory naive        # and again with: --memory memtools
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
# Kernels are compiled for each number of pairs, which hardly ever comes again: a thousand kept, as
# is usual, were several hundred MiB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
os.environ.setdefault("LRU_CACHE_CAPACITY", "8")
import numpy as np
import torch
from measure import MIB, BatchMeter, limit_data, size
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

ELEMENTS = 12  # C N O S P F Cl Br I B Se, and any other
ROUNDS, WIDTH, BONDS = 6, 64, 4  # of messages; none, single, double, triple
RADII = torch.linspace(0.8, 12.0, 24)  # Angstrom: centres of the functions that encode distances
BATCH, ACCUMULATION_STEPS = 4, 16  # molecules per backward(); of those per update
FIRST = 64  # molecules that the inputs are standardised by
MOST_ATOMS = 2048  # per backward(), with memtools, to begin with: hardly any update has more
OUT_OF_MEMORY = "can't allocate memory|bad_alloc"  # as torch on the host says it


class Molecule(NamedTuple):
    name: str
    element: Tensor  # [n]
    position: Tensor  # [n, 3], Angstrom
    bond: Tensor  # [b, 3]: two atoms, and the order


class Graph(NamedTuple):
    """Molecules side by side: atoms, and all pairs of atoms of the same one, both ways."""

    element: Tensor  # [n]
    sender: Tensor  # [p]
    receiver: Tensor  # [p]
    pair: Tensor  # [p, RADII + BONDS]: distance and bond


def collate(molecules: list[Molecule]) -> Graph:
    senders, receivers, pairs, first = [], [], [], 0
    for molecule in molecules:
        n = len(molecule.element)
        order = torch.zeros(n, n, dtype=torch.long)
        a, b, kind = molecule.bond.T
        order[a, b] = order[b, a] = kind
        distance = torch.cdist(molecule.position, molecule.position)
        i, j = (~torch.eye(n, dtype=torch.bool)).nonzero(as_tuple=True)
        near = torch.exp(-2 * (distance[i, j, None] - RADII).square())
        pairs.append(torch.cat([near, functional.one_hot(order[i, j], BONDS)], dim=1))
        senders.append(first + i)
        receivers.append(first + j)
        first += n
    element = torch.cat([molecule.element for molecule in molecules])
    return Graph(element, torch.cat(senders), torch.cat(receivers), torch.cat(pairs))


class Messages(nn.Module):
    """One round: every atom hears from every other one of its molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heard_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.sender, self.receiver = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Linear(len(RADII) + BONDS, WIDTH)
        self.message, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.update = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, graph: Graph) -> Tensor:
        x = self.norm(h)
        said = self.sender(x)[graph.sender] + self.receiver(x)[graph.receiver]
        said = functional.silu(said + self.pair(graph.pair))  # [p, WIDTH]: what takes the memory
        said = functional.silu(self.message(said)) * self.gate(said).sigmoid()
        heard = torch.zeros_like(x).index_add_(0, graph.receiver, said.to(x.dtype))
        new: Tensor = self.update(torch.cat([x, self.heard_norm(heard)], dim=1))
        return h + new


def surroundings(graph: Graph) -> Tensor:
    """How many atoms each one has at which distance, and bonds of which kind."""
    count = torch.zeros(len(graph.element), graph.pair.shape[1])
    return count.index_add_(0, graph.receiver, graph.pair).log1p()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Linear(len(RADII) + BONDS, WIDTH)
        self.rounds = nn.ModuleList(Messages() for _ in range(ROUNDS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ELEMENTS))

    def standardise(self, molecules: list[Molecule]) -> None:
        """What atoms see around them becomes 0 on average of these, and spread by 1."""
        seen = surroundings(collate(molecules))
        with torch.no_grad():
            self.around.weight /= seen.std(dim=0).clamp(min=0.1)
            self.around.bias.copy_(-self.around.weight @ seen.mean(dim=0))

    def forward(self, graph: Graph) -> Tensor:
        h = self.around(surroundings(graph))
        for messages in self.rounds:
            h = messages(h, graph)
        logits: Tensor = self.head(h)
        return logits


def loss_of(model: Network, molecules: list[Molecule], reduction: str) -> tuple[Tensor, int]:
    """Cross entropy of the elements, and how many there are."""
    graph = collate(molecules)
    logits = model(graph).float()
    return functional.cross_entropy(logits, graph.element, reduction=reduction), len(logits)


def read(options: argparse.Namespace) -> tuple[list[Molecule], list[Molecule]]:
    """What to train on, in order, and what to validate with."""
    counts = ["--train", str(options.molecules), "--valid", str(options.valid)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "molecules.npz"))
        script = Path(__file__).with_name("molecules.py")
        command = [sys.executable, str(script), path, *counts, "--seed", str(options.seed)]
        if subprocess.run(command).returncode != 0:
            sys.exit("The molecules could not be read")
        with np.load(path) as data:
            molecules = [*unpacked(data)]
    return molecules[: options.molecules], molecules[options.molecules :]


def unpacked(data: Any) -> Iterator[Molecule]:
    atoms, bonds = data["atoms"].tolist(), data["bonds"].tolist()
    element = torch.split(torch.from_numpy(data["element"]).long(), atoms)
    position = torch.split(torch.from_numpy(data["position"]), atoms)
    bond = torch.split(torch.from_numpy(data["bond"]).long(), bonds)
    for name, *parts in zip(data["name"].tolist(), element, position, bond, strict=True):
        yield Molecule(name, *parts)


def train_naive(
    model: Network, optimizer: Any, molecules: list[Molecule], meter: BatchMeter
) -> None:
    batches = [molecules[i : i + BATCH] for i in range(0, len(molecules), BATCH)]
    for i, batch in enumerate(batches, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, atoms = loss_of(model, batch, "mean")
        backward(loss / ACCUMULATION_STEPS)
        meter.after_batch(batch[0].name, float(loss.detach()), atoms)
        del loss
        if i % ACCUMULATION_STEPS == 0 or i == len(batches):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            meter.after_update(len(molecules[: BATCH * i]) - meter.molecules)
        if i % 10 == 0:
            gc.collect()
            torch.cuda.empty_cache()  # nothing, where there is no CUDA


def train_memtools(
    model: Network, optimizer: Any, molecules: list[Molecule], meter: BatchMeter
) -> str:
    """The same updates; returns what memtools says of them."""
    import memtools

    def loss_sum(batch: list[Molecule]) -> tuple[Tensor, int]:
        loss, atoms = loss_of(model, batch, "sum")
        meter.after_batch(batch[0].name, float(loss.detach()) / atoms, atoms)
        return loss, atoms

    memtools.allocator_settings().set(mmap_threshold="1 MiB")  # memtools 1: what is freed goes
    layers = memtools.checkpoint_layers(model)  # memtools 2: rounds compute again in backward
    acc = memtools.GradAccumulator(  # memtools 3: casts, divides, clips and steps
        model, optimizer, precision="bf16", max_norm=1.0, micro_batch_size=MOST_ATOMS
    )
    monitor, policy = memtools.MemoryMonitor(), memtools.CleanupPolicy()  # memtools 4
    per_update = BATCH * ACCUMULATION_STEPS
    with monitor, policy:
        for i in range(0, len(molecules), per_update):
            update = molecules[i : i + per_update]
            report = acc.step(update, loss_sum, by_atoms)  # memtools 5: in parts that fit
            meter.after_window(report, len(update))
            policy.step()  # memtools 6: in place of gc.collect() and empty_cache()
            monitor.step()
    said = [str(layers), str(acc.report()), str(policy.report()), monitor.summary()]
    layers.remove()
    return "\n".join(said)


def by_atoms(molecules: list[Molecule], most: int) -> list[list[Molecule]]:
    """Consecutive molecules of `most` atoms together; a larger one is by itself."""
    parts: list[list[Molecule]] = []
    room = 0
    for molecule in molecules:
        room -= len(molecule.element)
        if room < 0:
            parts.append([])
            room = most - len(molecule.element)
        parts[-1].append(molecule)
    return parts


@torch.no_grad()
def validate(model: Network, molecules: list[Molecule]) -> float:
    """Cross entropy per atom."""
    loss, atoms = 0.0, 0
    for i in range(0, len(molecules), BATCH):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            part, count = loss_of(model, molecules[i : i + BATCH], "sum")
        loss, atoms = loss + float(part), atoms + count
    return loss / atoms


def train(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    molecules, others = read(options)
    model = Network()
    model.standardise(molecules[:FIRST])
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, fused=True)
    per_update = BATCH * ACCUMULATION_STEPS
    meter = BatchMeter(options, -(-len(molecules) // per_update), ACCUMULATION_STEPS)
    limit_data(options.limit)
    report = ""
    try:
        if options.memory == "naive":
            train_naive(model, optimizer, molecules, meter)
        else:
            report = train_memtools(model, optimizer, molecules, meter)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not re.search(OUT_OF_MEMORY, str(error)):
            raise
        ended = f"out of memory in update {len(meter.losses) + 1}"
        return meter.result(ended, None, "\n".join([str(error), *getattr(error, "__notes__", [])]))
    return meter.result("finished", validate(model, others), report)


def summarise(result: dict[str, Any]) -> None:
    print(f"peak RSS {result['peak_rss_bytes'] / MIB:.1f} MiB, {result['seconds']:.1f} s")
    for number, update in enumerate(result["made_of"], start=1):
        if number in (1, len(result["made_of"])):
            print(f"update {number} was of {update['molecules']} molecules, ", end="")
            print(f"{update['atoms']} atoms, scaled by {update['scale']:.2f}")
    spread = max((update["spread"] for update in result["made_of"]), default=1.0)
    print(f"Within an update one atom counted up to {spread:.1f} times as much as another")
    if result["valid_loss"] is None:
        sys.exit(f"{result['ended']}: {result['report']}")
    print(f"validation loss {result['valid_loss']:.4f} nats per atom")
    if result["report"]:
        print(result["report"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A graph network on real molecules of any size.")
    parser.add_argument("--memory", choices=["naive", "memtools"], default="memtools")
    parser.add_argument(
        "--limit", type=size, default="128 MiB", help="what training may allocate; or none"
    )
    parser.add_argument("--molecules", type=int, default=1300, help="to train on, once")
    parser.add_argument("--updates", type=int, help="of 64 molecules each, in place of --molecules")
    parser.add_argument("--valid", type=int, default=200, help="others, to validate with")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more are slower on small machines")
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.updates is not None:
        options.molecules = options.updates * BATCH * ACCUMULATION_STEPS
    if options.molecules < 1 or options.valid < 1:
        parser.error("--molecules and --valid must be at least 1")
    result = train(options)
    if options.json:
        Path(options.json).write_text(json.dumps(result))
    summarise(result)


if __name__ == "__main__":
    main()
