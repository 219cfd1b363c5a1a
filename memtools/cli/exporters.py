"""Which of the libraries that the monitor's figures can go to are installed."""

from __future__ import annotations

import importlib.metadata

from memtools.cli.facts import Fact, Section, known

# Name in the report, and what is asked for; the first that is installed counts.
LIBRARIES = {
    "prometheus_client": ("prometheus-client",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "transformers": ("transformers",),
    "lightning": ("lightning", "pytorch-lightning"),
}


def exporter_facts() -> Section:
    """Versions, without importing anything: Lightning alone takes seconds."""
    return {name: _version(packages) for name, packages in LIBRARIES.items()}


def _version(packages: tuple[str, ...]) -> Fact:
    for package in packages:
        try:
            return known(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Fact(None, "not installed")
