"""Trainers on two processes, plain and in use: `torchrun --nproc_per_node 2 -m
tests.integrations.two_ranks FOLDER NAME...`. The first process writes FOLDER/NAME.pt for each case.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import IntervalStrategy

import memtools
from tests.integrations.tinytrl import KINDS, logged, model, parameters, trainer
from tests.kit.oominject import Inject

PLAIN = KINDS[0]
TWO_BATCHES = {"gradient_accumulation_steps": 2}


class Case(NamedTuple):
    """A training on two processes.

    Attributes:
        kind: of the trainer.
        options: of its arguments.
        shards: who puts the model in fully_shard, "transformers" or "accelerate"; "" for
            DistributedDataParallel.
        rows: of each batch of the second process. The first has 4.
        single: whether the first batch of the second process has one row.
        evaluates: whether it evaluates before the first update and after each, which leaves whole
            parameters in fully_shard.
        is_mean: whether the model's loss is a mean, without num_items_in_batch.
        part: the rows of a part to begin with.
        fails: the passes of the second process that run out of memory.
        loss: "extreme" for one that cannot be cut on the second process, "gathered" for one that
            exchanges values.
    """

    kind: str = PLAIN
    options: dict[str, Any] = {}
    shards: str = ""
    rows: int = 4
    single: bool = False
    evaluates: bool = False
    is_mean: bool = False
    part: int = 2
    fails: dict[str, set[int]] = {}
    loss: str = ""


BOTH = {
    "uneven rows, two batches": Case(rows=3, part=1, options=TWO_BATCHES),
    "a mean": Case(is_mean=True, rows=3),
    "with evaluations": Case("SFT", evaluates=True),
    "SFT": Case("SFT", rows=3, options=TWO_BATCHES),
    "DPO": Case("DPO"),
    "out of memory": Case(part=4, options=TWO_BATCHES, fails={"forward": {4}, "backward": {1}}),
    "SFT out of memory": Case("SFT", part=4, rows=3, fails={"backward": {1}}),
    "no row fits": Case(fails={"forward": set(range(99))}),
    "one row first": Case(single=True),
    "an extreme": Case(loss="extreme", options=TWO_BATCHES),
}
CASES = {
    **BOTH,
    "GRPO": Case("GRPO"),
    "RLOO": Case("RLOO"),
    "a gathered loss": Case(loss="gathered"),
    "a static graph": Case(options={"ddp_static_graph": True}),
    **{f"sharded: {name}": case._replace(shards="transformers") for name, case in BOTH.items()},
    "sharded by accelerate": Case(
        shards="accelerate", rows=3, part=4, options=TWO_BATCHES, fails={"backward": {1}}
    ),
}


def made_for(case: Case, folder: Path, rank: int) -> Any:
    """The trainer of a case."""
    at_load = {"distributed_config": DistributedConfig(fsdp_size=2)}
    made = trainer(
        case.kind, folder, net=model(folder, **at_load if case.shards == "transformers" else {}),
        per_device_train_batch_size=4, ddp_backend="gloo", **case.options,
    )  # fmt: skip
    if case.shards == "accelerate":  # which takes fsdp_config for accelerators only
        made.is_fsdp_enabled, state = True, made.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
        )  # fmt: skip
    if case.evaluates:
        made.eval_dataset = made.train_dataset
        made.args.eval_strategy, made.args.eval_steps = IntervalStrategy.STEPS, 1
        made.args.eval_on_start = True
    if case.is_mean:
        made.model_accepts_loss_kwargs = False
    collate, compute_loss, batches = made.data_collator, made.compute_loss, [0]

    def collated(rows: Any) -> Any:
        batches[0] += 1
        most = 1 if case.single and batches[0] == 1 else case.rows
        return collate(rows[:most] if rank else rows)

    def computed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(model, inputs, *args, **kwargs)
        if case.loss == "gathered":
            return loss + 0 * made.accelerator.gather(loss.detach()).sum()
        return loss * len(inputs["input_ids"]) if rank else loss

    made.data_collator = collated
    if case.loss:
        made.compute_loss = computed
    return made


def run(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Both trainings: their parameters and logs, and what the adapters of all processes said."""
    plain = made_for(case, folder, rank)
    plain.train()
    used = made_for(case, folder, rank)
    inject, error = Inject(**case.fails if rank else {}), ""

    def hook(module: Any, args: Any, output: Any) -> Any:
        return inject(output) if torch.is_grad_enabled() else output

    layers = (m for m in used.model.modules() if "DecoderLayer" in type(m).__name__)
    next(layers).register_forward_hook(hook)
    adapter = memtools.use(used, micro_batch_size=case.part)
    try:
        used.train()
    except (RuntimeError, MemoryError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    said: list[Any] = [None, None]
    dist.all_gather_object(said, f"{adapter}\n{error}")
    phases = [phase.name for phase in adapter.monitor.phases()]
    return {
        "plain": parameters(plain), "used": parameters(used), "phases": phases, "said": said,
        "logs": (logged(plain), logged(used)), "passes": inject.forwards,
    }  # fmt: skip


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    model(folder / str(rank))  # Of several processes only the first would save it.
    dist.init_process_group("gloo")
    for name in names:
        found = run(CASES[name], folder / str(rank), rank)
        if not rank:
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
