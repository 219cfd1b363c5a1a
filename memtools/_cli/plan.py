"""`memtools plan`: what a training step will need, before anything runs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from memtools._cli.progress import Progress
from memtools._cli.records import complain, printed


class Plan:
    """Plan the memory of a training step without running it.

    The function makes the model, the optimizer and the data, and returns the step, a callable
    without arguments. Both run with torch's fake tensors, which have shapes but no memory, so
    neither memory nor a device is needed.

    It prints the peak of the step, by category and over time, and what torch's caching allocator
    would reserve; its model of that has not been measured on a GPU yet. Memory that GPU kernels use
    internally, such as that of convolutions, is not included.

    With --vary, the function is called with other values of its arguments. Then it also prints what
    each of them saves, and the best setting for each limit: the first one that fits, in the order
    given, with the changes of the program that cost the least time.

    The exit code is 2 if the step cannot be planned; the reason is one line on stderr.
    """

    name = "plan"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "target",
            metavar="MODULE:FUNCTION",
            help="a module, in this folder or installed, and its function that returns the step",
        )
        parser.add_argument(
            "--limits",
            default="",
            metavar="SIZES",
            help="show whether the step fits these limits, such as 8,12,16,24GiB; a number "
            "without a unit takes the next unit in the list",
        )
        parser.add_argument(
            "--vary",
            action="append",
            default=[],
            metavar="NAME=VALUES",
            help="plan with each of these values of an argument of the function, such as "
            "batch=8,16,32, the preferred value first; may be repeated. "
            "precision=float32,bfloat16 needs no argument: it plans the step under autocast",
        )
        parser.add_argument(
            "--measure",
            metavar="NAME=VALUES",
            help="for a step whose shapes depend on values, such as one that calls nonzero: run "
            "real steps on the CPU with these small values of an argument, such as "
            "batch=8,16, four times each, and fit the plan to them",
        )
        parser.add_argument(
            "--device",
            choices=("cuda", "cpu"),
            default="cuda",
            help="the device to plan for, which need not be present (default: cuda)",
        )
        parser.add_argument(
            "--json", action="store_true", help="the same facts as JSON: bytes, stable keys"
        )
        parser.add_argument(
            "--markdown", action="store_true", help="print a Markdown table, for a README"
        )

    def run(self, args: argparse.Namespace) -> int:
        from memtools._plan.run import planned

        try:
            limits = sizes_of(args.limits)
            vary = dict(map(lever_of, args.vary)) or None
            measure = None if args.measure is None else dict([lever_of(args.measure)])
            function = _function(args.target)
            with Progress() as progress:
                found = planned(
                    function, limits, vary, args.device, measure, partial(_tell, progress)
                )
        except (ValueError, TypeError, ImportError) as error:
            return complain(args.prog, error)
        if args.json:
            printed(json.dumps(found.as_json()))
        else:
            printed(found.markdown() if args.markdown else found.table())
        return 0


def _tell(progress: Progress, number: int, settings: Sequence[Mapping[str, Any]]) -> None:
    from memtools._plan.settings import setting_text

    progress(f"planning {number + 1} of {len(settings)}: {setting_text(settings[number])}")


def lever_of(text: str) -> tuple[str, list[Any]]:
    """The name and the values of `batch=8,16,32`: numbers, true and false, or texts. Raises
    ValueError if it is not written so."""
    name, equals, values = text.partition("=")
    name, parts = name.strip(), [part.strip() for part in values.split(",")]
    if not (equals and name.isidentifier() and all(parts)):
        raise ValueError(f"give a lever as NAME=VALUES, such as batch=8,16,32, got {text!r}")
    return name, [_value(part) for part in parts]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def sizes_of(text: str) -> list[str]:
    """The sizes of `8,12,16GiB`: a number without a unit has that of the next one with a unit."""
    sizes, unit = list[str](), ""
    for part in reversed(text.split(",") if text.strip() else ()):
        part = part.strip()
        unit = part.lstrip("0123456789. ") or unit
        sizes.insert(0, part if part.endswith(unit) else part + unit)
    return sizes


def _function(target: str) -> Any:
    """The function that a target names. Raises ValueError if there is none."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"give MODULE:FUNCTION, such as train:make, got {target!r}")
    if module_name.endswith(".py") or "/" in module_name:
        raise ValueError(f"give the module's name, as in `import`, not its file: {target!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"there is no module {error.name} in this folder or among installed ones"
            ) from error
        raise ValueError(
            f"the module {module_name} imports {error.name}, which is not there"
        ) from error
    except Exception as error:
        raise ValueError(
            f"importing {module_name} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"the module {module_name} has no function {name}")
        found = getattr(found, part)
    return found
