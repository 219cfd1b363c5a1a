"""memtools in accelerate: `from memtools.integrations.accelerate import accumulator`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    acc = accumulator(accelerator, model, optimizer, steps=4, scheduler=scheduler)
    for batch in loader:
        with acc.micro_batch():
            loss_sum, count = ...
            acc.backward(loss_sum, weight=count)
    acc.flush()

The model and the loader are used as accelerate prepared them. The optimizer and the scheduler are
taken out of accelerate's wrappers, which look for installed packages in every step, and step a
scheduler as often as there are processes.
"""

from __future__ import annotations

from typing import Any

from memtools import GradAccumulator

__all__ = ["accumulator"]


def accumulator(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    steps: int | None = None,
    *,
    scheduler: Any = None,
    **options: Any,
) -> GradAccumulator:
    """Make a GradAccumulator for what `accelerator.prepare()` returned.

    It replaces `accelerator.accumulate()`, `backward()`, `clip_grad_norm_()` and the steps of the
    optimizer and the scheduler. With mixed_precision="bf16" the forward pass runs under
    accelerate's autocast.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: the prepared model.
        optimizer, scheduler: prepared or not.
        steps: micro-batches of an update. None: the accelerator's `gradient_accumulation_steps`.
        options: further arguments of GradAccumulator.

    Raises ValueError if the accelerator has another number of steps, scales losses itself (fp16),
    or uses DeepSpeed, Megatron or XLA.
    """
    set_there = accelerator.gradient_accumulation_steps
    if steps is None:
        steps = set_there
    elif set_there not in (1, steps):
        raise ValueError(
            f"steps={steps}, and the accelerator has gradient_accumulation_steps={set_there}; "
            "give one of them, or the same number"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f'mixed_precision="{accelerator.mixed_precision}" scales losses or weights itself; '
            'give the Accelerator "no", and precision="fp16" here'
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"{kind} owns the backward pass; GradAccumulator cannot accumulate in it")
    return GradAccumulator(
        model,
        getattr(optimizer, "optimizer", optimizer),
        steps,
        scheduler=getattr(scheduler, "scheduler", scheduler),
        **options,
    )
