# ruff: noqa: E501  (messages are as long as they are)
"""Messages in texts of any size and any kind: where they are, whose they are, and at what cost."""

from __future__ import annotations

import io
import json
import os
import re
import re._parser as parser
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools._oom.log as log_module
import memtools._oom.message as message_module
from memtools import _cli as cli
from memtools._base.text import shown_lines
from memtools._oom.log import Log, search
from memtools._oom.message import FORMS, MOST
from memtools._oom.verdict import verdict_of
from memtools._oom.words import as_json, explained, refusal
from tests.kit.long import LONG
from tests.oom.messages import CASES, CUDA_NEW, HINT, gib, mib

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} MiB. GPU {gpu} has a "
    "total capacity of 79.15 GiB of which 100.00 MiB is free. Including non-PyTorch memory, this "
    "process has 79.05 GiB memory in use. Of the allocated memory 77.00 GiB is allocated by PyTorch, "
    "and 50.00 MiB is reserved by PyTorch but unallocated." + HINT
)
NOISE = "ep 13 train, step 95, ctc_4 4.363, mem_usage:cuda:0 8.9GB, 0.750 sec/step\n"


def log_of(text: str | bytes) -> Log:
    return search(io.BytesIO(text.encode() if isinstance(text, str) else text))


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 3, 40_000])
def test_a_message_is_found_in_a_long_log_with_its_line(before: int) -> None:
    log = log_of(NOISE * before + OOM.format(asked=512, gpu=3) + "\n" + NOISE * 20_000)
    assert log.main is not None
    assert (log.main.line, log.main.device, log.main.requested) == (before + 1, 3, mib(512))
    assert (log.count, log.lines) == (1, before + 1 + 20_000)
    assert log.size == len(NOISE) * (before + 20_000) + len(OOM.format(asked=512, gpu=3)) + 1


def test_a_message_at_any_place_of_a_piece_is_found_once(monkeypatch) -> None:
    monkeypatch.setattr(log_module, "PIECE", 4096)
    monkeypatch.setattr(log_module, "AROUND", 1024)
    message = OOM.format(asked=512, gpu=0) + "\n"
    for lines in range(0, 140, 3):
        for shift in (0, 17):
            log = log_of("x" * shift + "\n" + NOISE * lines + message + NOISE * 60)
            assert log.count == 1, (lines, shift)
            assert log.main is not None
            assert log.main.line == lines + 2
            assert log.main.unallocated == mib(50)
            assert log.lines == lines + 62


def test_a_pipe_that_gives_a_few_bytes_at_a_time_reads_the_same() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(7, size or 7))

    text = (NOISE * 30 + OOM.format(asked=512, gpu=0)).encode()
    slow, fast = search(Slow(text)), log_of(text)
    assert slow.messages == fast.messages
    assert (slow.lines, slow.size) == (fast.lines, fast.size)


def test_the_line_of_the_program_is_that_of_the_traceback_without_libraries() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 93, in <module>\n'
        '    main()\n  File "/home/me/train.py", line 57, in main\n    loss.backward()\n'
        '  File "/x/lib/python3.11/site-packages/torch/_tensor.py", line 624, in backward\n'
        "    torch.autograd.backward(\n" + OOM.format(asked=512, gpu=0)
    )
    assert log_of(text).main.place == "train.py:57 in main"
    assert "the program was at train.py:57 in main" in explained(log_of(text), "log")
    assert log_of(OOM.format(asked=1, gpu=0)).main.place is None


# --- ranks ----------------------------------------------------------------------------------------

PREFIXES = {
    "[rank{n}]: ": "rank {n}",
    "[default{n}]:": "rank {n}",
    "(Worker_TP{n} pid=54{n}) ERROR 07-29 21:48:54 [multiproc_executor.py:962] ": None,
    "{n}: ": "task {n}",
    "[1,{n}]<stderr>:": "rank {n}",
    "2025-11-12T11:25:13.4961658Z [rank{n}]: ": "rank {n}",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_messages_of_several_ranks_whose_lines_are_mixed(prefix: str) -> None:
    lines = {n: OOM.format(asked=100 + n, gpu=n).replace(". ", ".\n").split("\n") for n in range(4)}
    mixed = [
        prefix.format(n=n) + lines[n][i]
        for i in range(max(map(len, lines.values())))
        for n in range(4)
        if i < len(lines[n])
    ]
    log = log_of("\n".join(mixed))
    found = {one.device: one for one in log.messages}
    assert sorted(found) == [0, 1, 2, 3]
    assert len(log.messages) == 4
    for n, one in found.items():
        assert (one.requested, one.allocated) == (mib(100 + n), gib(77)), n
        if PREFIXES[prefix] is not None:
            assert one.rank == PREFIXES[prefix].format(n=n)
        else:
            assert one.rank == f"Worker_TP{n} pid=54{n}"
    text = explained(log, "log")
    assert text.count("requested 10") >= 3
    assert log.main.device == 0


def test_one_message_that_two_handlers_print_is_one() -> None:
    text = OOM.format(asked=512, gpu=0)
    log = log_of(f"{text}\n{NOISE * 3}[rank0]: {text}\n")
    assert [one.rank for one in log.messages] == ["rank 0"]


def test_two_messages_in_one_line_cut_each_other() -> None:
    whole = OOM.format(asked=512, gpu=0)
    log = log_of(f"CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1{whole}")
    first, second = log.messages
    assert (first.requested, first.device, first.allocated) == (gib(2), 1, None)
    assert (second.requested, second.device, second.allocated) == (mib(512), 0, gib(77))


def test_of_what_ended_a_run_the_message_that_says_most_is_explained() -> None:
    text = f"{OOM.format(asked=512, gpu=0)}\nfailed (exitcode: -9) local_rank: 5\nKilled\n"
    assert log_of(text).main.kind == "torch"
    # The first was caught, and the run went on.
    text = f"{OOM.format(asked=512, gpu=0)}\n{NOISE * 600}Killed\n"
    log = log_of(text)
    assert (log.main.kind, log.main.line) == ("shell", 602)
    assert "line 1: requested 512.0 MiB" in explained(log, "log")
    # The last one of a rank, the first of the ranks.
    text = "\n".join(
        f"[rank{n}]: {OOM.format(asked=512 + k, gpu=n)}" for k in range(2) for n in (2, 1)
    )
    assert (log_of(text).main.rank, log_of(text).main.requested) == ("rank 2", mib(513))


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expandable"),
    [
        ("", None),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF='max_split_size_mb:64,expandable_segments:True' python x.py", True),
        ('os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"', False),
        ("PYTORCH_HIP_ALLOC_CONF: expandable_segments:true", True),
        ("expandable_segments=True", True),
    ],
)
def test_whether_expandable_segments_is_on_is_what_the_log_says(setting, expandable) -> None:
    case = next(case for case in CUDA_NEW if case.name == "2.2, fragmented")
    text = f"{setting}\n{case.text}"
    log = log_of(text)
    assert log.expandable is expandable
    verdict = verdict_of(log.main, log.expandable)
    advised = any("expandable_segments:True" in one.text for one in verdict.changes)
    assert advised is (expandable is not True)
    assert verdict.cause == ("unknown" if expandable else "fragmentation")


def test_changes_that_are_enough_come_first() -> None:
    case = next(case for case in CUDA_NEW if case.name == "2.9, another process has the device")
    first, *_ = verdict_of(log_of(case.text).main).changes
    assert "end the other process on the device (2493055)" in first.text
    assert (first.most, first.enough) == (gib(12.02), True)
    case = next(case for case in CUDA_NEW if case.name == "2.2, fragmented")
    first, *rest = verdict_of(log_of(case.text).main).changes
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in first.text
    assert first.enough
    assert [one for one in rest if one.enough] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1.8, fragmented", "use torch 2.1 or later and set PYTORCH_CUDA_ALLOC_CONF="),
        ("2.2, fragmented", "set PYTORCH_CUDA_ALLOC_CONF="),
        ("2.9, another process has the device", "set PYTORCH_ALLOC_CONF="),
        ("HIP, fragmented", "set PYTORCH_HIP_ALLOC_CONF="),
        ("XPU 2.12", None),
        ("MPS 2.1, GB for GiB", None),
    ],
)
def test_the_setting_is_that_of_the_version_and_the_device(name: str, words: str | None) -> None:
    case = next(case for case in CASES if case.name == name)
    changes = [one.text for one in verdict_of(log_of(case.text).main).changes]
    found = [text for text in changes if "expandable_segments:True" in text]
    if words is None:
        assert found == []
    else:
        assert [text.startswith(words) for text in found] == [True]


def test_much_memory_outside_of_pytorch_is_looked_at() -> None:
    verdict = verdict_of(log_of(OOM.format(asked=512, gpu=0)).main)
    held = next(one for one in verdict.changes if "outside PyTorch" in one.text)
    assert (held.most, held.enough) == (gib(79.05) - gib(77) - mib(50), None)


def test_in_a_container_the_process_itself_is_not_another_one() -> None:
    case = next(case for case in CUDA_NEW if case.name == "2.5, two processes of a container")
    verdict = verdict_of(log_of(case.text).main)
    tiers = {tier.name: tier.bytes for tier in verdict.tiers}
    assert "process 734147" not in tiers
    assert tiers["process 608946"] == gib(14.91)
    assert tiers["this process, not PyTorch's"] == gib(29.07) - gib(25.50) - gib(3.14)
    assert sum(tiers.values()) == pytest.approx(gib(95.22), abs=gib(0.03))


def test_the_tiers_are_drawn_to_scale() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 48.00 GiB of "
        "which 12.00 GiB is free. Including non-PyTorch memory, this process has 36.00 GiB memory in "
        "use. Of the allocated memory 24.00 GiB is allocated by PyTorch, and 8.00 GiB is reserved by "
        "PyTorch but unallocated."
    )
    bars = {
        re.split("  +", line.strip())[0]: line.partition("|")[2].rstrip("|")
        for line in explained(log_of(text), "log").splitlines()
        if line.endswith("|")
    }
    drawn = {name: (bar.find("#"), bar.count("#")) for name, bar in bars.items()}
    assert drawn["allocated by PyTorch"] == (0, 18)
    assert drawn["reserved but unallocated"] == (18, 6)
    assert drawn["this process, not PyTorch's"] == (24, 3)
    assert drawn["free"] == (27, 9)
    assert drawn["requested"] == (0, 12)


# --- hostile texts --------------------------------------------------------------------------------


def repeats(tree: Any, inside: bool = False) -> Any:
    """(largest count, whether it is inside of another repetition) of each in an expression."""
    for op, value in tree:
        if str(op) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, high, body = value
            yield int(high), inside
            yield from repeats(body, inside or int(high) > 1)
        elif str(op) == "BRANCH":
            for branch in value[1]:
                yield from repeats(branch, inside)
        elif str(op) == "SUBPATTERN":
            yield from repeats(value[3], inside)
        elif str(op) in ("ASSERT", "ASSERT_NOT"):
            yield from repeats(value[1], inside)


def expressions() -> dict[str, str]:
    found = {form.kind: form.words.pattern for form in FORMS}
    for form in FORMS:
        found |= {f"{form.kind} {k}": v.pattern for k, v in (form.figures or {}).items()}
    for module in (message_module, log_module):
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found[name] = value.pattern
    return found


@pytest.mark.parametrize("name", expressions())
def test_no_expression_can_run_away(name: str) -> None:
    found = list(repeats(parser.parse(expressions()[name])))
    assert all(high <= 300 for high, _ in found), found
    # Inside of another one only a part of a fixed form: "{1,6}." of a module's name.
    assert all(high <= 60 for high, inside in found if inside), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["out of memory", "killed", "exitcode: -9\n", "oom-kill:constraint=", "Tried to allocate 1 GiB ",
     OOM.format(asked=1, gpu=0) + "\n", OOM.format(asked=1, gpu=0), "DataLoader worker (pid 1",
     "Error " * 3, "expandable_segments:True ", "PYTORCH_ALLOC_CONF=", "\n", "\r", "Process 1 has 1 "],
)  # fmt: skip
def test_a_text_that_is_made_of_anchors_is_looked_at_in_few_places(part, monkeypatch) -> None:
    looks: list[int] = []
    real = message_module.messages_in

    def counted(before, line, after, *rest):
        looks.append(len(line) + sum(map(len, before)) + sum(map(len, after)))
        return real(before, line, after, *rest)

    monkeypatch.setattr(log_module, "messages_in", counted)
    log = log_of(part * (2_200_000 // len(part)))
    assert len(looks) <= 2 * log_module.MANY_HEAVY + 400
    assert max(looks, default=0) <= 2 * log_module.AROUND + 2 * log_module.LINE + 4096
    assert len(log.messages) <= 2 * log_module.KEPT


def test_a_message_is_not_lost_among_thousands_of_harmless_lines() -> None:
    harmless = "worker finished with exit code 0, killed 0 jobs, is out of memory no more\n" * 9_000
    log = log_of(harmless + OOM.format(asked=512, gpu=3) + "\n" + harmless)
    assert log.main is not None
    assert (log.main.line, log.main.requested) == (9_001, mib(512))


def test_messages_of_many_ranks_are_all_found() -> None:
    lines = [f"[rank{n}]: {OOM.format(asked=100 + n, gpu=n % 8)}\n" for n in range(256)]
    log = log_of(NOISE * 100 + "".join(lines))
    assert (log.count, len(log.messages)) == (256, 256)
    assert log.main.rank == "rank 0"


@pytest.mark.slow
def test_a_long_log_is_read_in_bounded_memory() -> None:
    class Endless:
        """32 MiB of a log with a message in each MiB."""

        def __init__(self) -> None:
            self.left, self.rest = 32, b""

        def read(self, size: int) -> bytes:
            if not self.rest and self.left:
                self.left -= 1
                text = NOISE * 14_000 + OOM.format(asked=self.left, gpu=0) + "\n"
                self.rest = text.encode()
            part, self.rest = self.rest[:size], self.rest[size:]
            return part

    file: Any = Endless()
    tracemalloc.start()
    try:
        log = search(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert log.size > 30 << 20
    assert log.count == 32
    assert peak < 16 << 20


def test_a_log_of_powershell_and_of_another_language() -> None:
    text = f"学習開始\n{OOM.format(asked=512, gpu=0)}\n訓練時 dataLoader killed\n"
    for encoding in ("utf-8", "utf-16", "utf-8-sig", "gb18030"):
        log = log_of(text.encode(encoding))
        assert log.main is not None, encoding
        assert (log.main.kind, log.main.line) == ("torch", 2)
        assert log.main.unallocated == mib(50)


def test_line_ends_of_windows_and_of_progress_bars() -> None:
    case = next(case for case in CASES if case.name == "cudaMallocAsync, in columns")
    log = log_of("50%|###   |\r51%|###   |\r" + case.text.replace("\n", "\r\n") + "\r\n")
    assert log.main is not None
    assert {name: getattr(log.main, name) for name in case.fields} == case.fields


def test_what_is_not_a_text_is_said() -> None:
    assert refusal(log_of(b"\x7fELF\0\0\0Killed"), "a") == "a is neither a record nor a text"
    assert log_of("x" * 100 + "\0\0\nKilled\n").main is not None


@pytest.mark.slow
def test_nothing_that_a_terminal_obeys_is_passed_on(tmp_path, capsys) -> None:
    hostile = "\x1b]0;x\x07\x9b31m\u202e\x00"[:-1]
    path = tmp_path / "log"
    path.write_text(
        f"{hostile}[rank0]: CUDA out of memory. {hostile} Tried to allocate 1.00 GiB{hostile}\n"
        f'  File "{hostile}.py", line 3, in {hostile}\nMemoryError: {hostile}\n'
        f"oom-kill:constraint={hostile},oom_memcg=/{hostile},task={hostile},pid=3\n"
    )
    for words in (["explain", str(path)], ["explain", "--json", str(path)]):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert shown_lines(out) == out


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_a_message_that_is_cut_anywhere_has_fewer_figures_and_no_other_ones(case) -> None:
    whole = log_of(case.text).main
    for end in range(len(case.text)):
        log = log_of(case.text[:end])
        if log.main is None or log.main.kind != whole.kind:
            continue
        for name, value in log.main.figures.items():
            full = whole.figures.get(name)
            # A number that is cut in its digits or before its unit is not the whole one.
            is_last = case.text[:end].rstrip()[-1:].isalnum()
            assert value == full or is_last, (name, case.text[:end][-40:])
        explained(log, "log")
        as_json(log, "log")


PARTS = st.one_of(
    st.sampled_from([case.text for case in CASES]),
    st.sampled_from(["[rank0]: ", "[rank1]: ", "\n", "\r", "\x1b[31m", "\x00", "\u202e", "9" * 30,
                     ".", " GiB", "Process 1 has 9 GiB memory in use. ", "0 bytes", "Killed\n",
                     "Traceback (most recent call last):\n", "17179869184.00 GiB"]),
    st.text(max_size=20),
)  # fmt: skip


@st.composite
def mutated(draw: Any) -> bytes:
    """Messages that are cut, joined, mixed line by line and damaged."""
    texts = draw(st.lists(PARTS, min_size=1, max_size=4))
    texts = [text[draw(st.integers(0, len(text))) :][: draw(st.integers(0, 800))] for text in texts]
    if draw(st.booleans()):
        lines = [text.split(" ") for text in texts]
        size = draw(st.integers(1, 5))
        texts = [
            " ".join(words[i : i + size]) + draw(st.sampled_from(["\n", " ", ""]))
            for i in range(0, max(map(len, lines)), size)
            for words in lines
        ]
    data = bytearray("".join(texts), "utf-8", "replace")
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@pytest.mark.slow
@settings(max_examples=3000 if LONG else 100, deadline=None)
@given(mutated())
def test_any_text_is_explained_or_refused_in_a_sentence(data: bytes) -> None:
    log = log_of(data)
    if log.main is None:
        said = refusal(log, "log")
        assert "\n" not in said
        assert len(said) < 300
        return
    text = explained(log, "log")
    assert shown_lines(text) == text
    facts = json.loads(json.dumps(as_json(log, "log"), allow_nan=False))
    for one in facts["messages"]:
        assert all(one[name] is None or 0 <= one[name] < 2**63 for name in message_module.SIZES)
        assert len(one["quote"]) <= MOST
        assert 1 <= one["line"] <= log.lines
    verdict = verdict_of(log.main, log.expandable)
    assert verdict.cause in ("size", "fragmentation", "limit", "unknown")
    assert all(tier.bytes >= 0 for tier in verdict.tiers)
    assert verdict.missing is None or verdict.missing >= 0


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_standard_input_and_a_pipe(tmp_path) -> None:
    text = OOM.format(asked=512, gpu=0).encode()
    command = [sys.executable, "-m", "memtools", "explain"]
    done = subprocess.run([*command, "-"], input=text, capture_output=True, check=True)
    assert b"CUDA 0 ran out of memory: 512.0 MiB did not fit." in done.stdout
    assert b"standard input, line 1 of 1" in done.stdout
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = subprocess.Popen(["tee", fifo], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    reader = subprocess.Popen([*command, fifo], stdout=subprocess.PIPE)
    writer.communicate(text)
    assert b"512.0 MiB did not fit" in reader.communicate()[0]
    assert reader.returncode == 0
