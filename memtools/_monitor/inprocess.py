"""The inside of `memtools run train.py`: starts the monitor before the program, ends it after.

    cli/boot/sitecustomize.py ──► begin(options) ──► the program ──► atexit ──► exit(code) ─┐
                                                                       │    or a signal    │
                                              the monitor's run ends ◄─┘                   ▼
                                    how it ended into run.mem, then cli/summary.py reads it

Nothing here may change what the program does. Steps are those of torch's optimizers, counted by a
hook that torch offers for it, and until an optimizer acts the calls of outermost modules, which are
counted without a hook (csrc/py/monitor/forwards.h). Both begin when the program imports torch. An
unchanged program gets its leak test and guard there, at the end of a step on its own thread.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from memtools import _core
from memtools._base import environment, process
from memtools._base.classes import with_subclasses
from memtools._base.every import Every
from memtools._base.file import folder_now, seen_from
from memtools._base.size import format_bytes
from memtools._base.steps import OPTIMIZERS, Steps, is_of_another_step
from memtools._base.terminal import (
    ERROR,
    NAME,
    has_colours,
    rank_prefix,
    width,
    write_bytes,
    write_message,
    write_text,
)
from memtools._base.text import shown, shown_lines
from memtools._leak.finding import Key, LeakFinding
from memtools._leak.shown import terminal_lines
from memtools._monitor import sharing, worker
from memtools._monitor.ending import ending, interrupt, keep_interrupt, watch
from memtools._monitor.log import ranked, refusal
from memtools.errors import MemtoolsError

if TYPE_CHECKING:
    from memtools import MemoryMonitor
    from memtools._monitor.phases import Phase

MODULES = "torch.nn.modules.module"
PROCESSES = "multiprocessing.process"
TRAINER = "transformers.trainer"
LIGHTNING = "lightning.pytorch.trainer.call", "pytorch_lightning.trainer.call"
#: By Lightning's hook after a batch that is not trained on, the phase of which it is a step.
_EVALUATED: Final = {
    "on_validation_batch_end": "validate",
    "on_test_batch_end": "test",
    "on_predict_batch_end": "predict",
}
_EVALUATION_ENDS: Final = frozenset(
    ("on_validation_end", "on_test_end", "on_predict_end", "on_exception")
)
RESERVE = 16 << 20  # Address space, in bytes, for the end of the run.
#: So many calls of modules are kept back: the leak test looks first at the sixteenth step.
KEPT_BACK = 16
KEPT_BACK_TO_TRAIN = 1024  # So many are if the program has made an optimizer that has not acted.

_Made = TypeVar("_Made")


def has_optimizer() -> bool:
    """Whether the program has made an optimizer of torch's kind, even one that is gone: the first
    optimizer of each class marks the class's step()."""
    base = getattr(sys.modules.get(OPTIMIZERS), "Optimizer", None)
    kinds = () if base is None else with_subclasses(base)
    return any(getattr(vars(kind).get("step"), "hooked", False) for kind in kinds)


class StepCounter:
    """Count the steps of an unchanged program, and let the monitor act at the end of each.

        optimizer.step() ──► __call__ ──────┐   the same one again,
        model(x) ──────────► module_ended ──┴─► not another of one step ──► monitor.step()

    A step is counted when one that has acted since the last step acts again. So a generator and a
    discriminator, the optimizers of any number of layers, or a model and its loss make one step.

    Until an optimizer acts, calls of outermost modules count: inference, evaluation, the extraction
    of features. What a backward pass computes again, for checkpointing, is not one. The first 16
    are kept back, because most programs that begin so are about to train: they count if there is a
    sixteenth before an optimizer acts, or at the end of the program. Where there is an optimizer by
    then, which has not acted, the program is sampling for its first step: 1,024 are kept back.
    """

    # torch.compile leaves calls of it to Python.
    _torchdynamo_disable = True

    def __init__(self, monitor: MemoryMonitor) -> None:
        self._monitor = monitor
        self._steps = Steps()
        self._trains = False
        self._forwards, self._kept_back = 0, KEPT_BACK
        self._evaluation: Phase | None = None
        #: -1 outside of a backward pass, once torch is there
        self._graph_task: Callable[[], int] = lambda: -1

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        """Called when an optimizer's step has ended. Raises HostMemoryPressure if a guard asks for
        it."""
        if is_of_another_step(sys._getframe(1)):
            return
        if not self._trains:
            self._begin_training()
        if self._steps.begins(optimizer):
            self._monitor.step()

    def module_ended(self, module: object) -> None:
        """Called when a call of an outermost module has ended. Raises as for an optimizer."""
        if self._trains or self._graph_task() != -1 or not self._steps.begins(module):
            return
        forwards = self._forwards = self._forwards + 1  # Other threads count theirs meanwhile.
        if forwards == KEPT_BACK and has_optimizer():
            self._kept_back = KEPT_BACK_TO_TRAIN
        if forwards < self._kept_back:
            self._monitor.step(0)
        else:
            self._monitor.step(self._kept_back if forwards == self._kept_back else 1)

    def end(self) -> None:
        """Count the calls that were kept back: the program has ended, and no optimizer has acted.
        Their count is below 16, at which the leak test looks first."""
        if not self._trains and self._forwards < KEPT_BACK:
            self._trains = True
            self._monitor._count(self._forwards)

    def _begin_training(self) -> None:
        """From here on the optimizers' steps count, and calls of modules no longer do."""
        self._trains = True
        _core._watch_calls(None, None, 0)
        self._steps.clear()
        if self._forwards >= self._kept_back:
            self._monitor._restart_leak_test()

    def batch_evaluated(self, phase: str = "evaluate") -> None:
        """Called when a Trainer has evaluated a batch. Between updates such batches are steps of
        their own phase; until an optimizer acts, the calls of the model count. Raises as for an
        optimizer."""
        if not self._trains:
            return
        if self._evaluation is None:
            self._evaluation = self._monitor.phase(phase, own_steps=True)
            self._evaluation.__enter__()
        try:
            self._monitor.step()
        except BaseException:
            self.evaluated()
            raise

    def evaluated(self) -> None:
        """Called when a Trainer has evaluated all batches, or trains."""
        phase, self._evaluation = self._evaluation, None
        if phase is not None:
            phase.__exit__(None, None, None)

    # --- called when the program has imported the module ---

    def watch_optimizers(self, module: ModuleType) -> None:
        # An older torch has no such hook: there the calls of modules go on counting.
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self)
        sharing.watch(load=True)  # torch loads the tracker as well

    def watch_evaluation(self, module: ModuleType) -> None:
        """Add a callback to those that every Trainer has."""

        def batch_evaluated(*_: object, **__: object) -> None:
            self.batch_evaluated()

        def evaluated(*_: object, **__: object) -> None:
            self.evaluated()

        with contextlib.suppress(AttributeError, TypeError):  # another version of transformers
            hooks = {
                "on_prediction_step": batch_evaluated,
                "on_evaluate": evaluated,
                "on_predict": evaluated,
                "on_step_begin": evaluated,  # after one that failed
            }
            kind = type("EvaluationCallback", (module.TrainerCallback,), hooks)
            module.DEFAULT_CALLBACKS.append(kind)

    def watch_lightning(self, module: ModuleType) -> None:
        """Wrap the function by which a Trainer of Lightning calls the hooks of its callbacks."""
        name = "_call_callback_hooks"
        call = getattr(module, name, None)  # None in another version of Lightning

        def call_hooks(trainer: Any, hook: str, *args: Any, **keywords: Any) -> Any:
            assert call is not None
            made = call(trainer, hook, *args, **keywords)
            if hook in _EVALUATED:
                self.batch_evaluated(_EVALUATED[hook])
            elif hook in _EVALUATION_ENDS:
                self.evaluated()
            return made

        if call is not None:
            setattr(module, name, call_hooks)

    def watch_modules(self, module: ModuleType) -> None:
        torch = sys.modules["torch"]
        self._graph_task = getattr(torch._C, "_current_graph_task_id", self._graph_task)
        call = vars(module.Module).get("__call__")
        if isinstance(call, FunctionType) and not self._trains:
            main = threading.main_thread().ident or 0
            _core._watch_calls(call, self.module_ended, main)


class _Imported:
    """Finder on sys.meta_path that calls a function when a module has been imported, once each.
    After the last one it removes itself.

    Args:
        then: by the name of the module, the function that is called with it.
    """

    def __init__(self, then: dict[str, Callable[[ModuleType], None]]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        then = self._then.pop(name, None)
        if then is None:
            return None
        if not self._then and self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, then)
                    spec.loader = loader
                return spec
        return None


class _Loader:
    def __init__(self, inner: Any, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then(module)


def count_steps(monitor: MemoryMonitor) -> StepCounter:
    """Count the steps of the program, which has not imported torch yet."""
    counter = StepCounter(monitor)
    then = {
        OPTIMIZERS: counter.watch_optimizers,
        MODULES: counter.watch_modules,
        PROCESSES: lambda _: worker.invite(),
        TRAINER: counter.watch_evaluation,
        **dict.fromkeys(LIGHTNING, counter.watch_lightning),
    }
    sys.meta_path.insert(0, _Imported(then))
    process.at_fork(_in_child)
    return counter


def _in_child() -> None:
    """The monitor is the parent's: a child has no steps."""
    _core._watch_calls(None, None, 0)


def _stop(reason: str) -> NoReturn:
    """End the process before the program has begun. SystemExit would be reported as an error of the
    module site."""
    os.write(2, f"memtools run: {reason}\n".encode(errors="backslashreplace"))
    os._exit(1)


def log_name(log: str | None, announced: Callable[[str], None]) -> str:
    """The given path, else run.mem, or one for temporary files where this folder is read-only; with
    the rank in it on ranks of one job."""
    if log is None and not os.access(os.curdir, os.W_OK):
        log = temporary_record(os.getpid())
        announced(f"this folder is read-only: the record is {log}")
    return ranked(log or "run.mem")


def temporary_record(process: int | str) -> str:
    """The path of the record of a process whose folder is read-only."""
    return os.path.join(tempfile.gettempdir(), f"run-{process}.mem")


def announce(text: str) -> None:
    """Lines of memtools on the standard error."""
    write_text(shown_lines(text))


def discard(*what: object) -> None:
    """Print nothing, as `--quiet` asks."""


class Findings:
    """Prints findings with the step at which they were made: two lines; one where the second would
    be the same as the last time; none where only the line that makes it is new, and not shown."""

    def __init__(self) -> None:
        #: of each finding: its grade and whether its forecast was known, and the second line
        self._shown: dict[Key, tuple[tuple[str, bool], list[str]]] = {}

    def __call__(self, finding: LeakFinding) -> None:
        run = _running[0]._live if _running and finding.per == "step" else None
        step = 0 if run is None or (finding.phase and run.inner is None) else run.step_count
        of = f" of {finding.phase}" if finding.phase else ""
        when = f"step {step:,}{of}" if step else ""
        head, rest = terminal_lines(finding, width(), colour=has_colours(ERROR), step=when)
        word = "no longer" if finding.over else finding.grade, bool(finding.forecast())
        known = self._shown.get(finding.key)
        self._shown[finding.key] = word, rest
        if known is None or known[1] != rest:
            write_message(head + rest)
        elif known[0] != word:
            write_message(head)


def print_summary(text: str) -> None:
    """A summary of `--print-every`."""
    for line in text.splitlines():
        announce(line)


def json_line(name: str) -> Callable[[Any], None]:
    """Return the function by which `--json` prints something: as a line of JSON, under this name. A
    finding is printed with all its fields."""

    def write(what: Any) -> None:
        what = what.as_json() if isinstance(what, LeakFinding) else what
        write_bytes(f"{json.dumps({name: what})}\n".encode())

    return write


_Voice = Callable[..., None]


def _voices(options: dict[str, Any]) -> tuple[_Voice, _Voice, _Voice]:
    """Return the functions that print a notice, a finding and a summary while the program runs."""
    if options["quiet"]:
        return discard, discard, discard
    if options["json"]:
        return json_line("notice"), json_line("finding"), json_line("summary")
    return announce, Findings(), print_summary


def opened(make: Callable[[], _Made]) -> _Made:
    """Return what `make` returns. Raises MemtoolsError if its record cannot be made."""
    try:
        return make()
    except OSError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        path = seen_from(folder_now(), str(error.filename))
        why = refusal(error.__cause__, path)
        raise MemtoolsError(f"the record {shown(path)} cannot be made: {why}") from error


def check_limit(limit: int | None) -> None:
    """Raise MemtoolsError for a limit that the interpreter alone has passed already."""
    used = _core.Probe().read().rss
    if limit is not None and used is not None and limit < used:
        raise MemtoolsError(
            f"the limit of {format_bytes(limit)} is below the {format_bytes(used)} that Python "
            "takes before the program begins; give a larger one"
        )


def _started(options: dict[str, Any]) -> MemoryMonitor:
    from memtools import MemoryMonitor

    environment.is_taken = True  # by this monitor, which has them as options

    def start() -> MemoryMonitor:
        notices, findings, summaries = _voices(options)
        monitor = MemoryMonitor(
            log_name(options["log"], notices),
            options["interval_ms"],
            limit=options["limit"],
            name="memtools run",
            trace=options["trace"],
        )
        every = options["print_every"]
        monitor._configure(
            print_every=None if every is None else Every(*every),
            sums_up=not options["quiet"],
            declares=False,
            by_time=True,
            announce=notices,
            says=findings,
            prints=summaries,
        )
        monitor.start()
        return monitor

    check_limit(options["limit"])
    return opened(start)


# --- the end --------------------------------------------------------------------------------------


def _prepare_summary(options: dict[str, Any], path: str) -> None:
    """Have another process print the summary of the record at `path` when this one ends.

    This process cannot: no Python runs any more when the exit code is known, or while a signal is
    handled, and a program that has used up a limit of its memory leaves none for a summary.
    """
    name = seen_from(folder_now(), path)
    words = [*options["summary"], path, name, *(["--json"] if options["json"] else [])]
    # All that is printed if that process fails.
    wrote = f"{rank_prefix()}{NAME}Wrote {shown(name)}\n"
    _core._set_last_command(
        tuple(os.fsencode(word) for word in words), wrote.encode(errors="backslashreplace")
    )


def _end(monitor: MemoryMonitor, counter: StepCounter, pid: int) -> None:
    """End the run as the last of all atexit functions, and have its summary printed."""
    if os.getpid() != pid:  # a forked child that ends as Python programs do
        return
    _reserve.clear()
    how = interrupt()
    counter.end()
    if how is None:
        _core._run_last_command(True)
        monitor._end(None)  # registers the end of the record, so that it comes before the summary
    else:
        monitor._end(how)
        with contextlib.suppress(KeyboardInterrupt):  # pressed again while the summary is printed
            _core._run_last_command(False)
        keep_interrupt()


_running: list[MemoryMonitor] = []


def record_path() -> str | None:
    """The path of the record that `memtools run` has written for this process since it began."""
    path = _running[0].record_path if _running else None
    return None if path is None else os.fspath(path)


#: memory for the end of the run, where the program has used up its own
_reserve: list[mmap.mmap] = []


def begin(options: dict[str, Any]) -> None:
    """Start the monitor with the options of `memtools run`; sitecustomize.py calls it."""
    try:
        monitor = _started(options)
        if options["guard"] is not None:
            monitor.guard(options["guard"], action="raise")
            if monitor._live is not None:  # the record shows a guard that got no step to act in
                monitor._live.log.event("guard_set", {"fraction": options["guard"]})
    except Exception as error:
        _stop(" ".join(str(error).split()) or type(error).__name__)
    _running.append(monitor)
    counter = count_steps(monitor)
    watch(whole_program=True)
    with contextlib.suppress(OSError):  # not touched, it takes addresses and no memory
        _reserve.append(mmap.mmap(-1, RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    ending.on_uncaught.append(_reserve.clear)
    if not options["quiet"]:
        _prepare_summary(options, str(monitor.record_path))
    # Registered first, so called last: after the program's own, and after its threads have ended.
    process.at_exit(_end, monitor, counter, os.getpid())
