"""A Trainer on several processes, plain and in use: `torchrun --nproc_per_node 2 -m
tests.integrations.two_ranks FOLDER`. The first process writes FOLDER/found.pt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import memtools
from tests.integrations.tinytrl import KINDS, parameters, trainer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    own = folder / os.environ["RANK"]  # for the model of each
    found, said = [], ""
    for is_used in (False, True):
        made = trainer(KINDS[0], own, per_device_train_batch_size=4, ddp_backend="gloo")
        if is_used:
            said = str(adapter := memtools.use(made))
        made.train()
        found.append(parameters(made))
    if made.is_world_process_zero():
        phases = [phase.name for phase in adapter.monitor.phases()]
        torch.save({"plain": found[0], "use": found[1], "said": said, "phases": phases},
                   folder / "found.pt")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
