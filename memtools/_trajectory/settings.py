"""UpdateSettings: how many samples a rollout has and how often they are used, in one place."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Self

from memtools._base.number import positive, whole_number


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The size of a rollout and the number of updates from it, for multi-epoch updates (PPO, GRPO).

        settings = memtools.UpdateSettings(batch_size=4, group_size=2, num_epochs=3)
        store = memtools.TrajectoryStore(50, settings.num_samples)

    Raises ValueError if an argument is out of range or conflicts with `single_update`.
    """

    #: prompts, conditions or environments of a rollout
    batch_size: int = 1
    #: samples of each
    group_size: int = 1
    #: passes over the samples
    num_epochs: int = 1
    #: mean KL divergence above which no further epoch begins
    kl_threshold: float | None = None
    #: one optimizer step per rollout, so that old probabilities need not be kept; needs
    #: `num_epochs` 1 and no `kl_threshold`
    single_update: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size", "num_epochs"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.kl_threshold is not None:
            positive("kl_threshold", self.kl_threshold)
        if not isinstance(self.single_update, bool):
            raise TypeError(
                f"single_update must be True or False, got {type(self.single_update).__name__}"
            )
        if self.single_update and self.num_epochs != 1:
            raise ValueError(
                f"single_update makes one update of each rollout, got num_epochs "
                f"{self.num_epochs}; pass num_epochs=1, or leave single_update out"
            )
        if self.single_update and self.kl_threshold is not None:
            raise ValueError(
                "single_update has no second epoch that kl_threshold could leave out; leave one of "
                "them out"
            )

    @property
    def num_samples(self) -> int:
        """`batch_size * group_size`."""
        return self.batch_size * self.group_size

    @classmethod
    def add_arguments(cls, parser: Any, **defaults: Any) -> None:
        """Add `--batch-size`, `--group-size`, `--num-epochs`, `--kl-threshold` (a number or "none")
        and `--single-update` to a command line.

        Args:
            parser: an `argparse.ArgumentParser`, or a group of one.
            defaults: by name, if they differ from those of this class.
        """
        plain = cls(**defaults)
        if not callable(getattr(parser, "add_argument", None)):
            raise TypeError(
                f"add_arguments() takes an argparse.ArgumentParser, got {type(parser).__name__}"
            )
        helps = {
            "batch_size": "prompts, conditions or environments of a rollout",
            "group_size": "samples of each of them",
            "num_epochs": "passes over the samples of a rollout",
            "kl_threshold": "mean KL divergence of an epoch that ends the epochs early, or none",
        }
        for name, text in helps.items():
            value = getattr(plain, name)
            kind = number_or_none if name == "kl_threshold" else int
            shown = "none" if value is None else value
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=kind, default=value, help=f"{text} (default: {shown})")
        parser.add_argument(
            "--single-update",
            action=argparse.BooleanOptionalAction,
            default=plain.single_update,
            help="one optimizer step for each rollout",
        )

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """Make settings from `arguments`, the `argparse.Namespace` of a parser with
        `add_arguments`. Raises ValueError as the class does, TypeError if one is missing."""
        missing = [field.name for field in fields(cls) if not hasattr(arguments, field.name)]
        if missing:
            raise TypeError(
                f"from_arguments() takes what a parser with add_arguments() has parsed; "
                f"{type(arguments).__name__} has no {missing[0]}"
            )
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    def __str__(self) -> str:
        text = (
            f"batch_size {self.batch_size} x group_size {self.group_size} = {self.num_samples} "
            f"samples, "
        )
        if self.single_update:
            return f"{text}single update"
        limit = "" if self.kl_threshold is None else f", kl_threshold {self.kl_threshold:g}"
        return f"{text}num_epochs {self.num_epochs}{limit}"


def number_or_none(text: str) -> float | None:
    """What stands on a command line for a number that may be left out: "none" is None. Raises
    ValueError."""
    return None if text == "none" else float(text)
