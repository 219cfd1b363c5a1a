"""What to do about a finding: the text after `fix: `.

    LeakFinding ──► ADVICE, the most special entry first ──► "clear it after use, or ..."

An entry is an imperative clause. It does not repeat the name of the holder, which is printed
before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memtools._leak.finding import FIRST_WRITES, FITS, RANK, TOO_LARGE, WORKERS, LeakFinding


def advice_for(finding: LeakFinding) -> str:
    """Return what to do, by the kind and the name of the holder; "" if there is nothing to do.
    Reads all fields but `advice`."""
    if finding.grade in ("early", "quiet") or finding.cause == FITS:
        return ""
    name = ENTRY.sub("", finding.holder)
    keeper = _KEPT.sub("", name)
    variable = re.search(r"'(\w+)'|(\w+)$", keeper)
    advice = next(text for fits, text in _ADVICE if fits(finding)).format(
        keeper=keeper,
        function=name.rpartition(" of ")[2],
        variable=(variable[1] or variable[2]) if variable else "x",
        process=finding.process or "the child processes",
        library=finding.library,
        release=finding.release,
    )
    if finding.cause == TOO_LARGE:
        advice += " (as it is, it will not fit)"
    if finding.key[0] == WORKERS and finding.holder and _grows(finding):
        advice += "; each worker has its own copy"
    return advice


#: The end of a path that leads to a part of each entry.
ENTRY = re.compile(
    r"(, as \S+ of each entry|, whose entries grow| \([\d,]+ [^()]*(?:of them|in it)\)"
    r"| \(such as [^()]*\)| \(its values keep its keys\))+$"
)
#: What is before the name of the object that keeps a graph or a chain.
_KEPT = re.compile(r"(?:autograd graphs?|chain of \S+) in ")
#: Containers whose entries stay until the program removes them.
_SEQUENCES = ("list", "deque", "tuple", "array")
_MAPPINGS = ("dict", "set", "frozenset", "OrderedDict", "defaultdict", "Counter", "mappingproxy")
#: Single objects that are reallocated, larger each time (such as a growing torch.cat).
_BUFFERS = ("variable", "tensor", "ndarray", "bytes", "bytearray", "str")

#: Libraries whose tables are not changed but made anew, with each row that is added.
_TABLES = ("pandas.", "polars.", "pyarrow.")

#: What collects the outputs of an evaluation of a transformers.Trainer.
_EVALUATION = "transformers.trainer_pt_utils.EvalLoopContainer"
#: Methods after which an object can be used again.
_EMPTIED = ("clear()", "reset()", "cache_clear()")
#: New models and trainers of a library; not outputs of models, or what is common to them.
_TRAINED = re.compile(
    r"new (?:(?:transformers|trl|peft|setfit|sentence_transformers|lightning|pytorch_lightning)\."
    r"[\w.]*(?:Trainer|Model|SentenceTransformer|For(?!\w*Output)[A-Z]\w*)"
    r"|(?:stable_baselines3|sb3_contrib)\.(?!common)[\w.]+) objects?\b"
)

_Fits = Callable[[LeakFinding], object]


def _grows(finding: LeakFinding) -> bool:
    return RANK[finding.grade] >= RANK["suspect"]


def _is_private(library: str) -> bool:
    return library.rpartition(".")[2].startswith("_")


def _is(*kinds: str) -> _Fits:
    return lambda finding: finding.kind in kinds


def _caused_by(cause: str) -> _Fits:
    return lambda finding: finding.cause == cause


def _is_of(*libraries: str) -> _Fits:
    return lambda finding: finding.library in libraries


def _named(pattern: str) -> _Fits:
    """Matches holders whose kind or path shows their purpose."""
    search = re.compile(pattern).search
    return lambda finding: search(finding.kind) or search(finding.holder)


#: (whether it fits a finding, what to do), the most special first.
_ADVICE: tuple[tuple[_Fits, str], ...] = (
    (
        _is("mapped files"),
        "nothing, as the system takes these pages back when memory is short; those of /dev/shm it "
        "does not: see ls -l /dev/shm",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.startswith("stable_baselines3."),
        "use a smaller buffer_size, optimize_memory_usage=True with "
        "replay_buffer_kwargs=dict(handle_timeout_termination=False), or frames as uint8",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.endswith(".LazyMemmapStorage"),
        "pass scratch_dir= with a directory on a disk (without it the files are in /dev/shm, which "
        "is memory), or a smaller max_size",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.startswith("torchrl."),
        "use a smaller max_size, frames as uint8, or LazyMemmapStorage(max_size, scratch_dir=...) "
        "with a directory on a disk",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.kind == FIRST_WRITES and one.holder,
        "allocate fewer rows, store frames as uint8 instead of float32, or use numpy.memmap",
    ),
    (
        _is(FIRST_WRITES),  # of which the array is not known, or whether it fits
        "allocate less if it does not fit: memory that was allocated earlier becomes resident when "
        "it is written, such as a buffer that is filled row by row",
    ),
    (
        _is("outside malloc"),
        "release what the program gives to a library that has its own allocator, such as pyarrow "
        "or Polars (pyarrow.total_allocated_bytes() has its figure)",
    ),
    (
        _is("idle heap"),
        "start with MALLOC_MMAP_THRESHOLD_=65536 (and MALLOC_ARENA_MAX=2 with many threads), use a "
        "memtools.CleanupPolicy, or load jemalloc",
    ),
    (
        _caused_by(TOO_LARGE),
        "give it a lower bound, or keep less in each entry (frames as uint8 instead of float32)",
    ),
    (
        lambda one: one.grade == "fills" and one.kind != "cycles",
        "nothing if it fits, as it stops when it is full; otherwise give it a lower bound",
    ),
    (
        lambda one: one.grade == "fragmentation",
        "call monitor.cleanup_memory(), or start with MALLOC_ARENA_MAX=2: memory in use does not "
        "grow, resident memory does",
    ),
    (
        _caused_by("profiler"),
        "give the profiler a schedule and call its step(), as it keeps all events until it stops: "
        "torch.profiler.schedule(wait=..., warmup=..., active=...)",
    ),
    (
        lambda one: one.kind == "C heap" and one.cause == "jumps",
        "remove what each step adds to a buffer of C or C++ code, which becomes larger each time "
        "it is full (a vector, an index)",
    ),
    (
        _is("C heap"),
        "look at what each step calls in C or C++ (a decoder, a tokenizer, convolutions of new "
        "shapes), and for an extension's object that is replaced by a larger one",
    ),
    (
        _is("Python objects"),
        "look at what each step gives to C code and never takes back (a callback, user data, a "
        "reference added by an extension or ctypes)",
    ),
    (
        _is("shared memory"),
        "call unlink() after close(), and see what is left in /dev/shm (ls -l /dev/shm)",
    ),
    (
        _is("processes"),
        "join() or terminate() each process, or start one pool for the whole run "
        "(persistent_workers=True for a DataLoader)",
    ),
    (
        _is("calls"),
        "join() the threads that run {function}, give what they wait for a timeout, or use one "
        "pool of threads",
    ),
    (
        _is("entries"),
        "delete what an entry was given after it was made (a cached property, a buffer) after "
        "use: the number of entries does not change, their size does",
    ),
    (_is("stream"), "call seek(0) and truncate() after use, or write to a file"),
    (
        _is("callbacks"),
        "register one function once, or call atexit.unregister(): callbacks and their arguments "
        "stay until the process ends",
    ),
    (
        _is("children"),
        "look in {process} for a list or cache that grows, or a queue that is filled faster than "
        "emptied; in a DataLoader's worker, for what the dataset keeps between items (memtools "
        "asks the process for the holder, within about 500 steps)",
    ),
    (
        _caused_by("collector"),
        "call gc.collect() every N steps, or gc.enable(): the program called gc.disable(), and "
        "reference cycles stay",
    ),
    (
        _is("cycles"),
        "call gc.collect() now and then (a memtools.CleanupPolicy does), or use "
        "torch.autograd.grad() instead of backward(create_graph=True)",
    ),
    (
        _named(r"create_graph=True"),
        "use torch.autograd.grad(), or zero_grad(set_to_none=True) after use",
    ),
    (
        lambda one: one.kind == "autograd graph" and one.holder.startswith("autograd graphs"),
        "keep loss.item() for a number, x.detach() for a tensor; evaluate under torch.no_grad()",
    ),
    (_is("autograd graph"), "keep {variable}.detach(), or {variable}.item() for a number"),
    (
        _caused_by("extension"),
        "remove what is no longer used, keep only the newest part (such as the last rows), or "
        "write it to a file",
    ),
    (
        lambda one: one.kind == "lru_cache" and one.library,
        "call its {release} now and then, or do not call it with new arguments each time",
    ),
    (
        _is("lru_cache"),
        "pass maxsize=..., which counts entries, or use memtools.data.ByteCache, which counts "
        "bytes",
    ),
    (
        _named(r"\bhooks\b|_hooks\b"),
        "register the hook once, or call remove() of the handle that the registration returned",
    ),
    (
        _named(r"optimizer state|\boptim\w*\.(?:\w+\.)*state\b|\b(?:Adam|AdamW|SGD)\.state\b"),
        "call optimizer.state.pop(parameter, None) when a parameter is no longer trained, or make "
        "a new optimizer",
    ),
    (
        _named(r"(?i)\b\w*(?:exception|traceback)s?\b|Error\b"),
        "keep str(error) or error.with_traceback(None): an exception keeps the variables of all "
        "its frames",
    ),
    (
        _is("chain"),
        "cut the link to the previous object after use, or keep the newest in "
        "collections.deque(maxlen=...): {keeper} leads to every earlier one",
    ),
    (_named(r"(?i)queue"), "pass maxsize=..., so that the producer waits"),
    (
        _is("WeakKeyDictionary"),
        "store weakref.ref(key) instead of the key in the value, and look for other references to "
        "the keys",
    ),
    (
        _is("WeakValueDictionary"),
        "keep no reference to the value in the key, and look for other references to the values",
    ),
    (
        _named(r"\(such as '_\d+'\)|\b_oh\b|\.Out\b|\bHistoryManager\b"),
        "end the cell with a semicolon, as IPython keeps what cells return (Out, _1, _2); "
        "%reset -f out frees the values",
    ),
    (
        lambda one: one.library == _EVALUATION and one.holder.endswith("]"),
        "keep one number a token by Trainer(preprocess_logits_for_metrics=lambda outputs, labels: "
        "outputs[0].argmax(-1)), as this model returns a tuple, or pass batch_eval_metrics=True, "
        "prediction_loss_only=True or, in a Seq2SeqTrainer, predict_with_generate=True",
    ),
    (
        _is_of(_EVALUATION),
        "keep one number a token by Trainer(preprocess_logits_for_metrics=lambda logits, labels: "
        "logits.argmax(-1)), or pass batch_eval_metrics=True or prediction_loss_only=True "
        "(eval_accumulation_steps=8 only moves logits from a GPU to the host)",
    ),
    (
        lambda one: one.library.endswith(".prediction_loop._PredictionLoop"),
        "pass return_predictions=False to Trainer.predict(), and write each batch to a file in a "
        "lightning.pytorch.callbacks.BasePredictionWriter",
    ),
    (
        lambda one: one.library.startswith("torchmetrics."),
        "call reset() at the end of each epoch (Lightning does it for a metric that is given to "
        "self.log()), and pass thresholds=100 to one of curves, to keep counts of predictions",
    ),
    (
        lambda one: one.library.startswith("torch.nn.modules.container."),
        "delete the modules that are no longer used (adapters of PEFT: delete_adapter(name) of "
        "the model)",
    ),
    (
        lambda one: _TRAINED.search(one.what) and not one.library,
        "keep numbers and the path of a saved checkpoint instead: each of these objects keeps a "
        "model, and a trainer the state of the optimizer as well",
    ),
    (
        _is_of("logging.handlers.MemoryHandler"),
        "give the handler a target and a smaller capacity, or log less",
    ),
    (
        _is_of("multiprocessing.pool.IMapIterator", "multiprocessing.pool.IMapUnorderedIterator"),
        "submit fewer tasks at a time, such as those of one epoch, or take results sooner",
    ),
    (
        _is_of("matplotlib._pylab_helpers.Gcf"),
        "call matplotlib.pyplot.close(figure) after saving or showing it",
    ),
    (
        _named(r"\bLogger\.handlers\b"),
        "add the handler once, or call removeHandler() and close()",
    ),
    (
        _named(r"\bthreading\._(?:active|limbo)\b"),
        "join() threads, cancel() timers, or use one pool of threads",
    ),
    (
        lambda one: one.library.startswith(_TABLES) and one.kind in _BUFFERS,
        "collect the parts in a list and join them once, keep only the newest rows, or write to a "
        "file",
    ),
    (
        lambda one: one.release in _EMPTIED and not _is_private(one.library),
        "call {release} of the {library} after use, or give it less to keep",
    ),
    (
        lambda one: one.library and one.release and not _is_private(one.library),
        "call {release} of the {library} after use and make a new one, or give it less to keep",
    ),
    (
        lambda one: one.library,
        "do not keep the {library} for the whole run, give it less to keep, or use an option of "
        "it that sets a limit",
    ),
    (
        _caused_by("views"),
        "keep view.clone(), as each view keeps the whole tensor, and delete what is no longer used",
    ),
    (
        lambda one: one.kind in _SEQUENCES and "gate" in one.holder.lower(),
        "clear it after use, or use deque(maxlen=...) or a memtools.GateHistory",
    ),
    (
        _is("deque"),
        "pass maxlen=... (maxsize= for a queue.Queue), or take from it as fast as it is filled",
    ),
    (_is(*_SEQUENCES), "clear it after use, or use deque(maxlen=...)"),
    (_is(*_MAPPINGS), "delete what is no longer used, or bound it"),
    (
        lambda one: one.kind in _BUFFERS and one.holder,
        "write into one buffer of the final size, or keep a detached copy of a part, or a number",
    ),
    (
        lambda one: one.signal == "device" and not one.holder,
        "take a snapshot to see which line allocates: torch.cuda.memory._record_memory_history(), "
        "some hundred steps later _dump_snapshot(path)",
    ),
    (
        lambda one: one.per == "s" and not one.holder,
        "call monitor.step() of a memtools.MemoryMonitor in each round of the loop: holders are "
        "found at the ends of steps, and none has ended yet",
    ),
    (
        lambda one: not one.holder,
        "find the holder by hand: before = memtools.census(), some hundred steps later "
        "print(*memtools.census().diff(before).holders(), sep='\\n')",
    ),
    (lambda one: True, "release it after use"),
)
