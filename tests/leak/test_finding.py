"""LeakFinding: one thing that grows, in fields and in one sentence."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from dataclasses import replace

import pytest

import memtools
from memtools import LeakFinding
from memtools._leak.advice import advice_for
from memtools._leak.finding import (
    GRADES,
    RANK,
    is_call,
    with_forecast,
)
from memtools._leak.judge import graded
from memtools._record import kinds

LOSSES = LeakFinding(
    "growing",
    signal="heap",
    rate_bytes=3.1 * 2**20,
    first_step=24,
    since_step=1,
    holder="list Trainer.losses",
    kind="list",
    what="2 new [2048, 64] float32 tensors a step",
    steps_left=(300.0, 420.0),
    seconds_left=(30.0, math.inf),
    advice="clear it",
)


def test_a_finding_is_one_sentence():
    assert str(LOSSES) == (
        "growing: list Trainer.losses +3.1 MiB/step (2 new [2048, 64] float32 tensors a step), "
        "limit in 300 to 420 steps"
    )


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (LeakFinding("suspect", "heap", rate_bytes=1536, kind="C heap"),
         "suspect: the C heap, whose holder is not known +1.5 KiB/step"),
        (LeakFinding("growing", "python", rate_bytes=1536, kind="Python objects",
                     what="1 new list object a step, which C code keeps"),
         "growing: Python objects whose holder is not known +1.5 KiB/step (1 new list object a "
         "step, which C code keeps)"),
        (LeakFinding("growing", "children", per="s", rate_bytes=2048, holder="dict Frames.seen",
                     process="worker 2", made_at="data.py:9 in load"),
         "growing: worker 2: dict Frames.seen +2.0 KiB/s; made at data.py:9 in load"),
        (LeakFinding("leak", "heap", holder="list a", rate_bytes=2048.0, steps_left=(30, 42),
                     over=True),
         "no longer: leak: list a +2.0 KiB/step"),
        (LeakFinding("fills", "heap", holder="deque replay", over=True),
         "no longer: fills: deque replay"),
        (LeakFinding("suspect", "rss"), "suspect: resident memory"),
        (LeakFinding("growing", "children", rate_bytes=65536, kind="children",
                     process="child process 71 (actor)"),
         "growing: child process 71 (actor) +64.0 KiB/step"),
    ],
)  # fmt: skip
def test_it_says_what_it_knows_and_nothing_else(finding, text):
    assert str(finding) == text


def test_the_grades_have_one_order_and_a_call_begins_at_growing():
    assert [is_call(grade) for grade in GRADES] == [False] * 5 + [True] * 3
    assert sorted(GRADES, key=RANK.__getitem__) == list(GRADES)


def test_programs_read_its_fields_and_none_for_what_is_not_known():
    found = LOSSES.as_json()
    expected = {"grade": "growing", "first_step": 24, "rate_bytes": 3.1 * 2**20, "per": "step",
                "holder": "list Trainer.losses", "made_at": None, "process": None,
                "advice": "clear it", "steps_left": [300.0, 420.0],
                "text": str(LOSSES)}  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_a_record_keeps_all_of_it():
    event, text = kinds.read("finding", kinds.payload("finding", LOSSES))
    assert text == str(LOSSES)
    assert {name: getattr(event, name) for name in vars(LOSSES)} == vars(LOSSES)


@pytest.mark.parametrize(
    ("kind", "holder", "words"),
    [
        ("list", "list Trainer.losses", ["clear", "maxlen"]),
        ("list", "list MoE.gate_history", ["GateHistory"]),
        ("defaultdict", "defaultdict Stats.series (55 lists in it)", ["delete", "bound"]),
        ("lru_cache", "lru_cache of Data.load()", ["maxsize", "bytes"]),
        ("deque", "deque PolicyInput.samples_queue", ["maxsize", "waits"]),
        ("hooks", "OrderedDict Layer._forward_pre_hooks", ["remove()"]),
        ("OrderedDict", "OrderedDict Layer._forward_pre_hooks (3 of them)", ["remove()"]),
        (
            "optimizer state",
            "Adam.state of 40 parameters",
            ["optimizer.state.pop", "new optimizer"],
        ),
        ("defaultdict", "defaultdict Cloud.optimizer.state", ["optimizer.state.pop"]),
        ("autograd graph", "autograd graph in hidden", ["hidden.detach()"]),
        ("autograd graph", "autograd graph in local 'loss' of f()", ["loss.detach()"]),
        (
            "autograd graph",
            "cycles of .grad made by backward(create_graph=True)",
            ["torch.autograd.grad()", "set_to_none=True"],
        ),
        ("autograd graph", "autograd graph in RNN.state.h", ["keep h.detach()"]),
        ("list", "list Runner.exceptions", ["with_traceback(None)"]),
        (
            "chain",
            "chain of dict in train.last",
            ["earlier one", "maxlen"],
        ),
        ("chain", "chain of ValueError in Worker.error", ["with_traceback(None)"]),
        ("ndarray", "all_preds", ["one buffer", "final size"]),
        ("Thing", "Thing run.thing", ["release it"]),
        ("entries", "list A.rows", ["an entry was given", "number of entries does not change"]),
        ("stream", "StringIO Run.log", ["seek(0) and truncate()"]),
        ("callbacks", "callbacks of atexit.register()", ["atexit.unregister()"]),
        ("dict", "dict attributes of module __main__ (such as '_128')", ["with a semicolon"]),
        ("dict", "dict attributes of module __main__ (such as 'x_128')", ["delete what is no"]),
    ],
)
def test_the_advice_is_a_clause_for_its_kind(kind, holder, words):
    finding = LeakFinding("growing", "heap", holder=holder, kind=kind)
    advice = advice_for(finding)
    assert [word for word in words if word not in advice] == []


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (LeakFinding("growing", kind="C heap"), "calls in C or C++"),
        (LeakFinding("growing", holder="list A.rows, whose entries grow", kind="entries"),
         "after use: the number of entries"),
        (LeakFinding("growing", kind="C heap", cause="profiler"), "schedule("),
        (LeakFinding("growing", kind="Python objects"), "what each step gives to C code"),
        (LeakFinding("leak", "shm", kind="shared memory"), "unlink()"),
        (LeakFinding("leak", "children", kind="children"), "the dataset"),
        (LeakFinding("leak", "children", kind="children", process="child process 7 (actor)"),
         "look in child process 7 (actor) for a list or cache"),
        (LeakFinding("leak", "children", kind="processes"), "join()"),
        (LeakFinding("leak", "heap", kind="cycles"), "gc.collect()"),
        (LeakFinding("likely", "device"), "torch.cuda.memory."),
        (LeakFinding("likely", "heap"), "memtools.census()"),
        (LeakFinding("fragmentation", "rss"), "MALLOC_ARENA_MAX"),
        (LeakFinding("fills", holder="deque replay", kind="deque"), "nothing if it fits"),
        (LeakFinding("growing", holder="dict Frames.seen", kind="dict", process="worker 2"),
         "or bound it; each worker has its own copy"),
        (LeakFinding("likely", "heap", per="s"), "call monitor.step()"),
        (LeakFinding("fills", "heap", kind="cycles"), "memtools.CleanupPolicy"),
        (LeakFinding("growing", "heap", holder="local 'payload' of upload()", kind="calls"),
         "join() the threads that run upload()"),
        (LeakFinding("growing", "heap", kind="cycles", cause="collector"), "gc.disable()"),
        (LeakFinding("growing", "heap", holder="dict A.b", kind="dict", cause="views"),
         "keep view.clone()"),
    ],
)  # fmt: skip
def test_there_is_advice_for_what_no_container_holds(finding, words):
    assert words in advice_for(finding)


EVALUATION = "transformers.trainer_pt_utils.EvalLoopContainer"
PREDICTION = "lightning.pytorch.loops.prediction_loop._PredictionLoop"


@pytest.mark.parametrize(
    ("kind", "holder", "library", "release", "words"),
    [
        ("list", "list TarFile.members", "tarfile.TarFile", "close()",
         "call close() of the tarfile"),
        ("list", "list Study.trials", "optuna.Study", "", "give it less to keep"),
        ("list", "list MemoryHandler.buffer", "logging.handlers.MemoryHandler", "close()",
         "a target"),
        ("deque", "deque IMapIterator._items", "multiprocessing.pool.IMapIterator", "",
         "submit fewer tasks"),
        ("lru_cache", "lru_cache of parse()", "parse()", "cache_clear()", "cache_clear()"),
        ("OrderedDict", "OrderedDict Gcf.figs", "matplotlib._pylab_helpers.Gcf",
         "", "pyplot.close(figure)"),
        ("list", "list Logger.handlers", "logging.Logger", "", "removeHandler()"),
        ("dict", "dict threading._active", "the module threading", "", "join()"),
        ("variable", "DataFrame._mgr[0]", "pandas.DataFrame", "", "join them once"),
        ("hooks", "OrderedDict Layer._forward_hooks", "torch.nn.Layer", "", "remove()"),
        ("WeakKeyDictionary", "WeakKeyDictionary x.CACHE (its values keep its keys)", "", "",
         "weakref.ref(key)"),
        ("list", "list Tape.rows", "recorder.Tape", "reset()", "call reset() of the recorder.Tape "
         "after use, or give"),
        ("list", "list _Tape.rows", "recorder._Tape", "reset()", "give it less to keep"),
        ("list", "list EvalLoopContainer.tensors[0]", EVALUATION, "", "outputs[0].argmax(-1)"),
        ("variable", "EvalLoopContainer.tensors", EVALUATION, "", "logits.argmax(-1)"),
        ("list", "list _PredictionLoop._predictions[0]", PREDICTION, "reset()",
         "return_predictions=False"),
        ("list", "list MeanAveragePrecision.detection_box",
         "torchmetrics.detection.mean_ap.MeanAveragePrecision", "reset()",
         "reset() at the end of each epoch"),
        ("dict", "dict Conv2d.lora_A", "torch.nn.modules.container.ModuleDict", "clear()",
         "delete_adapter(name)"),
    ],
)  # fmt: skip
def test_nobody_is_told_to_change_a_private_list_of_a_library(
    kind, holder, library, release, words
):
    finding = LeakFinding("likely", "heap", holder=holder, kind=kind, library=library,
                          release=release)  # fmt: skip
    assert words in advice_for(finding)
    assert "maxlen" not in advice_for(finding)
    assert "clear it" not in advice_for(finding)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("1 new stable_baselines3.ppo.ppo.PPO object every 9 steps", "a saved checkpoint"),
        ("2 new transformers.trainer.Trainer objects a step", "a saved checkpoint"),
        ("1 new transformers.models.vit.modeling_vit.ViTForImageClassification object a step",
         "a saved checkpoint"),
        ("1 new transformers.modeling_outputs.BaseModelOutput object a step", "clear it"),
        ("1 new transformers.models.bert.modeling_bert.BertForPreTrainingOutput object a step",
         "clear it"),
        ("1 new stable_baselines3.common.logger.Logger object a step", "clear it"),
        ("1 new mine.RowModel object a step", "clear it"),
    ],
)  # fmt: skip
def test_trainers_and_models_that_are_kept_are_not_told_to_be_bounded(what, words):
    finding = LeakFinding("likely", "heap", holder="list runs", kind="list", what=what)
    assert words in advice_for(finding)


@pytest.mark.slow
def test_what_the_advice_says_of_libraries_exists():
    lightning = pytest.importorskip("lightning.pytorch")
    pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    loop = importlib.import_module(PREDICTION.rpartition(".")[0])
    assert {"_PredictionLoop", "EvalLoopContainer"} <= {*vars(loop), *vars(pt_utils)}
    assert "return_predictions" in inspect.signature(lightning.Trainer.predict).parameters
    assert hasattr(lightning.callbacks, "BasePredictionWriter")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"kept_at": "a.py:3 in f"}, "(1 new str object a step); kept at a.py:3 in f"),
        ({"made_at": "a.py:1", "kept_at": "a.py:3 in f"},
         "(1 new str object a step); made at a.py:1, kept at a.py:3 in f"),
        ({"made_at": "a.py:3", "kept_at": "a.py:3"},
         "(1 new str object a step); made and kept at a.py:3"),
    ],
)  # fmt: skip
def test_the_line_that_keeps_it_is_beside_the_line_that_makes_it(lines, said):
    finding = LeakFinding(
        "likely", "heap", what="1 new str object a step", holder="list a", **lines
    )
    assert str(finding) == f"likely: list a {said}"
    assert finding.as_json()["kept_at"] == lines["kept_at"]


@pytest.mark.parametrize(
    ("kind", "explained", "only_gained", "grade"),
    [
        ("early", 1.0, True, "suspect"),
        ("quiet", 0.5, True, "suspect"),
        ("fragmentation", 0.9, True, "suspect"),
        ("suspect", 1.0, True, "growing"),
        ("suspect", 0.49, True, "suspect"),
        ("suspect", 1.0, False, "suspect"),
        ("growing", 0.8, True, "likely"),
        ("growing", 0.8, False, "growing"),
        ("growing", 0.1, True, "suspect"),
        ("likely", 1.2, True, "likely"),
        ("leak", 1.0, True, "leak"),
        ("quiet", math.inf, False, "suspect"),
    ],
)
def test_a_census_that_explains_growth_raises_its_grade(kind, explained, only_gained, grade):
    assert graded(kind, explained, only_gained=only_gained) == grade
    assert graded(kind, explained, only_gained=only_gained, bounded=True) == "fills"


def test_processes_are_counted_and_their_bytes_are_no_number():
    line = LeakFinding("growing", "children", kind="processes", rate_bytes=182_000.0,
                       what="9 processes, one more every 41 steps").line()  # fmt: skip
    assert line == "child processes +177.7 KiB/step (9 processes, one more every 41 steps)"


def test_the_limit_of_a_device_is_told_from_that_of_the_host():
    line = replace(LOSSES, signal="device").line()
    assert line.endswith("a step), limit of the device in 300 to 420 steps")


def test_what_advice_speaks_of_exists():
    """Names of memtools in the advice."""
    findings = [
        LeakFinding("likely", "heap", kind=kind, holder=holder, per=per)
        for kind in ("", "cycles", "C heap", "list")
        for holder in ("", "list MoE.gate_history")
        for per in ("step", "s")
    ]
    names = re.findall(r"memtools\.(\w+)", " ".join(map(advice_for, findings)))
    assert set(names) >= {"census", "CleanupPolicy", "GateHistory", "MemoryMonitor"}
    assert [name for name in names if not hasattr(memtools, name)] == []


def test_nothing_is_to_be_done_about_what_does_not_grow():
    assert [advice_for(LeakFinding(grade, "heap")) for grade in ("early", "quiet")] == ["", ""]


def test_a_finding_is_the_same_whatever_was_counted_in_it():
    graph = "autograd graph in layer3.hidden"
    first = LeakFinding("growing", holder=graph).key
    assert LeakFinding("leak", "rss", holder=graph).key == first
    other = LeakFinding("growing", holder=graph.replace("layer3", "layer4")).key
    in_worker = LeakFinding("growing", holder=graph, process="worker 1").key
    assert len({first, other, in_worker}) == 3
    lists = [LeakFinding("likely", holder=f"dict S.series ({n} lists in it)") for n in (5, 55)]
    assert lists[0].key == lists[1].key
    assert LeakFinding("suspect", "heap").key == LeakFinding("suspect", "rss").key == ("", "use")
    queues = [
        LeakFinding("likely", holder=f"deque P.samples{entry}") for entry in ("", "['queue']")
    ]
    assert queues[0].key == queues[1].key == ("", "deque P.samples")


def test_the_fastest_finding_has_the_forecast_of_all() -> None:
    rates = {"list a": 700.0, "list b": 200.0, "list c": 600.0}
    found = [LeakFinding("likely", "heap", rate_bytes=n, holder=name) for name, n in rates.items()]
    have = {one.holder: one.steps_left for one in with_forecast(found, (3.0, 9.0), None, 1200.0)}
    assert have == {"list a": (3.0, 9.0), "list b": None, "list c": (3.0, 9.0)}
    have = {one.holder: one.steps_left for one in with_forecast(found, (3.0, 9.0), None, 2000.0)}
    assert have == {"list a": (3.0, 9.0), "list b": None, "list c": None}
