"""memtools in accelerate: `from memtools.integrations.accelerate import accumulator`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    acc = accumulator(accelerator, model, optimizer, steps=4, scheduler=scheduler)
    for batch in loader:
        with acc.micro_batch():
            loss_sum, count = ...
            acc.backward(loss_sum, weight=count)
    acc.flush()

The model and the loader are used as accelerate prepared them. The optimizer and the scheduler are
taken out of their wrappers: these look up packages in every step, and step a scheduler once for
every process.
"""

from __future__ import annotations

from typing import Any

from memtools import GradAccumulator

__all__ = ["accumulator"]


def accumulator(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    steps: int = 1,
    *,
    scheduler: Any = None,
    **options: Any,
) -> GradAccumulator:
    """A GradAccumulator over what `accelerator.prepare()` returned.

    It takes the place of `accelerator.accumulate()`, `backward()`, `clip_grad_norm_()` and the
    steps of the optimizer and the scheduler. With the accelerator's mixed_precision="bf16" the
    model's forward pass is under accelerate's autocast.

    Args:
        steps, options: as of GradAccumulator.
        scheduler: prepared or not; steps once for each update, however many processes there are.

    Raises:
        ValueError: the accelerator accumulates itself, or scales losses (fp16): give these
            settings here instead; or it uses DeepSpeed or Megatron, which own the backward pass.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"the accelerator accumulates {accelerator.gradient_accumulation_steps} batches "
            "itself; leave gradient_accumulation_steps out, and give steps= here"
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
