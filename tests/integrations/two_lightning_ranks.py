"""Lightning's Trainer on two processes, plain and in use: `torchrun --nproc_per_node 2 -m
tests.integrations.two_lightning_ranks FOLDER`. The first process writes FOLDER/NAME.pt for each
case.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import memtools
from tests.integrations.test_use_lightning import Net, logged, parameters, trainer
from tests.kit.oominject import Inject


class Case(NamedTuple):
    """A training on two processes.

    Attributes:
        rows: of a batch of the second process. The first has 6.
        fails: the passes of the second process that run out of memory.
        extreme: whether its loss cannot be cut.
        options: of the trainer.
    """

    rows: int = 5
    fails: dict[str, set[int]] = {}
    extreme: bool = False
    options: dict[str, Any] = {}


TWO_BATCHES = {"accumulate_grad_batches": 2}
CASES = {
    "uneven rows": Case(options=TWO_BATCHES),
    "out of memory": Case(fails={"forward": {4}, "backward": {1}}),
    "one row": Case(rows=1),
    "an extreme": Case(extreme=True, options=TWO_BATCHES),
}


class OwnNet(Net):
    """Logs what has a value of the process in any case."""

    is_extreme = False

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss.square() if self.is_extreme else loss


def fitted(case: Case, folder: Path, rank: int, is_used: bool) -> tuple[Any, str, int]:
    """The parameters and logs of a training, what its adapter says, and its passes."""
    inject = Inject(**case.fails if rank and is_used else {})
    net = OwnNet(lambda out: inject(out) if torch.is_grad_enabled() else out)
    net.is_extreme = bool(case.extreme and rank)
    rows = case.rows if rank else 6
    made = torch.Generator().manual_seed(5 + rank)
    x, y = torch.randn(8 * rows, 4, generator=made), torch.randint(0, 3, (8 * rows,))
    loop = trainer(
        folder / str(is_used), devices=2, strategy="ddp", use_distributed_sampler=False,
        max_epochs=1, **case.options,
    )  # fmt: skip
    adapter = memtools.use(loop, micro_batch_size=3) if is_used else None
    loop.fit(net, DataLoader(TensorDataset(x, y % (1 + y.max())), batch_size=rows))
    logs = [] if rank else logged(loop)
    return (parameters(net), logs, net.norms), str(adapter), inject.forwards


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for name, case in CASES.items():
        torch.manual_seed(0)
        plain, _, _ = fitted(case, folder / name / str(rank), rank, False)
        torch.manual_seed(0)
        used, words, passes = fitted(case, folder / name / str(rank), rank, True)
        said: list[Any] = [None, None]
        dist.all_gather_object(said, words)
        if not rank:
            found = {"plain": plain, "used": used, "said": said, "passes": passes}
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
