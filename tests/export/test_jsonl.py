"""JsonlWriter: lines that can be read, whatever happens to the disk."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memtools
from memtools.export import JsonlWriter, jsonl
from tests.export.metricsource import Figures, usual
from tests.kit.interrupts import handled_before, interrupted_before


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> float:
        raise ValueError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def file_limit() -> Iterator[Any]:
    """Sets how large a file may grow: beyond it, write() does a part and then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_every_n_steps_is_on_disk_at_once(tmp_path):
    path, figures = tmp_path / "memory.jsonl", usual()
    with JsonlWriter(path, figures, every=10) as lines:
        for _ in range(25):
            lines.step()
        found = read(path)
        assert [line["step"] for line in found] == [10, 20]
        lines.step(30)  # several at once: one line
        assert [line["step"] for line in read(path)] == [10, 20, 55]
        lines.write()
    assert len(figures.asked) == 4
    assert found[0]["memory/host_rss_bytes"] == 3 * 2**30
    assert isinstance(found[0]["memory/host_rss_bytes"], int)
    assert found[0]["memory/host_percent"] == 37.5
    assert found[0]["memory/steps_left"] is None
    assert found[0]["memory/pressure_percent"] is None
    assert found[0]["time"] <= found[1]["time"]


def test_all_figures_are_there_for_experts(tmp_path):
    with JsonlWriter(tmp_path / "a", usual(), expert=True) as lines:
        lines.write()
    assert read(tmp_path / "a")[0]["memory/samples_total"] == 42


def test_a_file_that_is_there_is_continued_and_a_torn_line_ended(tmp_path):
    path = tmp_path / "memory.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "mem')
    with JsonlWriter(path, usual()) as lines:
        lines.step()
    last = path.read_text().splitlines()
    assert last[:2] == ['{"step": 1}', '{"step": 2, "mem']
    assert json.loads(last[2])["step"] == 1
    assert len(last) == 3


def test_files_rotate_by_size_and_the_oldest_goes(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with JsonlWriter("memory.jsonl", usual(), max_bytes=4096, keep=2) as lines:
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for _ in range(200):
            lines.step()
        assert lines.lines == 200
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["memory.jsonl", "memory.jsonl.1", "memory.jsonl.2"]
    steps = [line["step"] for name in reversed(names) for line in read(tmp_path / name)]
    assert steps == list(range(steps[0], 201))
    assert all((tmp_path / name).stat().st_size <= 4096 for name in names)
    assert (tmp_path / names[1]).stat().st_size > 3000


def test_a_descriptor_that_the_program_closed_and_used_again_is_left_alone(tmp_path, caplog):
    with JsonlWriter(tmp_path / "a", usual()) as lines:
        lines.step()
        number = lines._file.fileno()
        os.close(number)
        with open(tmp_path / "users", "wb", buffering=0) as users:
            assert users.fileno() == number
            users.write(b"mine")
            with caplog.at_level(logging.WARNING, "memtools"):
                lines.step()
                lines.step()
            lines.close()
            users.write(b" alone")
    assert (tmp_path / "users").read_bytes() == b"mine alone"
    assert len(read(tmp_path / "a")) == 1
    assert lines.lost == 1
    assert "the program has closed the descriptor" in caplog.records[0].getMessage()


def test_a_full_disk_costs_lines_and_one_warning_only(tmp_path, caplog):
    with JsonlWriter("/dev/full", usual()) as lines, caplog.at_level(logging.WARNING, "memtools"):
        for _ in range(5):
            lines.step()
        assert (lines.lines, lines.lost) == (0, 5)
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.records[0].getMessage()


def test_a_part_of_a_line_is_taken_back_and_later_lines_come(tmp_path, file_limit, caplog):
    path = tmp_path / "memory.jsonl"
    with JsonlWriter(path, usual()) as lines:
        lines.step()
        size = path.stat().st_size
        file_limit(size + 20)
        lines.step()  # a part
        file_limit(size)
        lines.step()  # nothing at all
        assert path.stat().st_size == size
        assert lines.lost == 2
        file_limit(2**20)
        lines.step()
    assert [line["step"] for line in read(path)] == [1, 4]
    assert len(caplog.records) == 1


def test_a_part_behind_somebody_elses_line_is_left_and_closed(tmp_path, file_limit):
    path = tmp_path / "memory.jsonl"
    with JsonlWriter(path, usual()) as lines:
        with open(path, "a") as other:
            other.write('{"other": 1}\n')
        size = path.stat().st_size
        file_limit(size + 20)
        lines.step()
        file_limit(2**20)
        lines.step()
    text = path.read_text().splitlines()
    assert [text[0], len(text[1]), json.loads(text[2])["step"]] == ['{"other": 1}', 20, 2]


def test_where_rotating_fails_the_file_stays_bounded_and_whole(tmp_path):
    path = tmp_path / "memory.jsonl"
    (tmp_path / "memory.jsonl.new").mkdir()  # the fresh file cannot be made
    with JsonlWriter(path, usual(), max_bytes=4096) as lines:
        for _ in range(100):
            lines.step()
        assert lines.lost > 50
        assert path.stat().st_size <= 4096
        (tmp_path / "memory.jsonl.new").rmdir()
        lines.step()
    assert read(path)[-1]["step"] == 101
    assert read(tmp_path / "memory.jsonl.1")[0]["step"] == 1


def test_a_rename_that_fails_leaves_no_new_file(tmp_path):
    path = tmp_path / "memory.jsonl"
    (tmp_path / "memory.jsonl.1" / "x").mkdir(parents=True)
    (tmp_path / "memory.jsonl.2").write_text("")  # a directory cannot be moved over a file
    with JsonlWriter(path, usual(), max_bytes=4096, keep=2) as lines:
        for _ in range(100):
            lines.step()
        assert lines.lost > 50
    assert not (tmp_path / "memory.jsonl.new").exists()


def test_a_pipe_without_a_reader_does_not_stop_the_training(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with JsonlWriter(path, usual()) as lines:
        for _ in range(2000):  # more than a pipe holds
            lines.step()
        assert lines.lost > 0
        assert lines.lines > 0


def test_a_line_cut_off_in_a_full_pipe_is_ended_before_the_next(tmp_path):
    """Also where nothing at all went into the pipe since."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    figures = Figures(**{f"figure{i}": i + 0.5 for i in range(400)})  # more than a page
    with JsonlWriter(path, figures) as lines, open(path, "rb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), False)
        while not lines._is_torn:
            lines.step()
        lost = lines.lost
        while lines.lost < lost + 10:  # the last of them write nothing
            lines.step()
        whole = lines.lines
        text = b"".join(iter(lambda: pipe.read(65536), None))
        lines.step()
        assert lines.lines == whole + 1
        text += pipe.read(65536)
    assert json.loads(text.split(b"\n")[-2])["step"] == whole + lines.lost + 1


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "memory.jsonl"
    with JsonlWriter(path, usual()) as lines:
        lines.step()
        if (pid := os.fork()) == 0:
            lines.step()
            lines.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        lines.step()
    assert [line["step"] for line in read(path)] == [1, 2]


def test_forgotten_it_is_closed_and_says_so(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match="unclosed JsonlWriter.*, 0 lines"):
        JsonlWriter(tmp_path / "a", usual())
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="at least 1"):  # and what was never opened says nothing
        JsonlWriter(tmp_path / "a", usual(), every=0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_while_it_is_made_leaves_no_descriptor(tmp_path):
    n, before = 0, descriptors()
    while True:
        made = list[JsonlWriter]()
        hit = interrupted_before(
            jsonl, n, lambda made=made: made.append(JsonlWriter(tmp_path / "a", usual()))
        )
        for lines in made:
            lines.close()
        assert descriptors() == before, n
        if not hit:
            break
        n += 1
    assert n > 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_while_files_rotate_leaves_no_descriptor_and_whole_lines(tmp_path):
    path, before, left, places = tmp_path / "a", descriptors(), list[int](), 0
    with JsonlWriter(path, usual(), max_bytes=4096, keep=2) as lines:
        while True:
            while lines._size + 1000 < lines._most:
                lines.write()
            first = lines.path, lines.lost
            hit = interrupted_before(jsonl, places, lambda: [lines.write() for _ in range(4)])
            lines.write()
            left.append(descriptors())
            assert (lines.path, lines.lost) == first
            assert path.stat().st_size <= 4096
            for found in tmp_path.iterdir():
                read(found)  # which raises for a line that is none
            if not hit:
                break
            places += 1
    assert {count - before for count in left} == {1}, left
    assert places > 100
    assert descriptors() == before


def test_an_interrupt_while_it_is_closed_leaves_no_descriptor(tmp_path):
    n, before = 0, descriptors()
    while True:
        lines = JsonlWriter(tmp_path / "a", usual())
        hit = interrupted_before(jsonl, n, lines.close)
        lines.close()
        assert descriptors() == before, n
        if not hit:
            break
        n += 1
    assert n > 5


def test_closed_it_does_nothing(tmp_path):
    lines = JsonlWriter(tmp_path / "a", usual())
    lines.step()
    lines.close()
    lines.close()
    lines.step()
    assert repr(lines) == f"JsonlWriter({str(tmp_path / 'a')!r}, 1 lines)"
    assert len(read(tmp_path / "a")) == 1


class Closing(Figures):
    """Has the writer closed while it is asked for figures."""

    def __init__(self) -> None:
        super().__init__(a=1.0)
        self.lines: JsonlWriter | None = None

    def metrics(self, expert: bool = False) -> dict[str, float]:
        if self.lines is not None:
            other = threading.Thread(target=self.lines.close)
            other.start()
            other.join()
        return super().metrics(expert)


def test_closed_by_another_thread_while_it_asks_for_figures_it_writes_nothing(tmp_path):
    figures = Closing()
    lines = JsonlWriter(tmp_path / "a", figures, max_bytes=4096)
    while lines._size + 60 < 4096:
        lines.step()
    written, figures.lines = lines.lines, lines
    lines.step(2**62)  # a line that does not fit: files would rotate
    assert (lines.lines, lines.lost) == (written, 0)
    assert len(read(tmp_path / "a")) == written
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("leaves", [False, True])
def test_a_signals_handler_may_close_it_at_any_place(tmp_path, leaves):
    """Handlers that return, and those that leave the program: what they raise comes through."""
    before, n, hit = descriptors(), 0, True
    while hit:
        folder = tmp_path / str(n)
        folder.mkdir()
        lines = JsonlWriter(folder / "a", usual(), max_bytes=4096)
        while lines._size + 300 < lines._most:
            lines.write()

        def handler(lines: JsonlWriter = lines) -> None:
            lines.close()
            if leaves:
                raise SystemExit

        def write(lines: JsonlWriter = lines) -> None:
            for _ in range(3):
                lines.write()

        try:
            hit = handled_before(jsonl, n, handler, write)
        except SystemExit:
            assert leaves
        else:
            assert not (leaves and hit), n
        if hit:
            assert descriptors() == before, n
        lines.close()
        for found in folder.iterdir():
            read(found)  # which raises for a line that is none
        n += 1
    assert n > 100
    assert descriptors() == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every is at least 1, got 0"),
        ({"keep": 0}, ValueError, "keep is at least 1, got 0"),
        ({"max_bytes": 100}, ValueError, "max_bytes is at least 4 KiB, got 100 B"),
        ({"source": Figures}, TypeError, "got the class Figures; pass the monitor"),
        ({"source": {"a": 1}}, TypeError, "got a dict; pass the monitor"),
        ({"path": "none/such"}, FileNotFoundError, "none/such"),
    ],
)
def test_bad_arguments_are_refused_and_no_file_is_made(
    arguments, error, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        JsonlWriter(**{"path": "a", "source": usual(), **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_real_monitor_is_written_and_what_it_says_is_there(tmp_path):
    path = tmp_path / "memory.jsonl"
    with memtools.MemoryMonitor() as monitor, JsonlWriter(path, monitor, every=2) as lines:
        for _ in range(6):
            monitor.step()
            lines.step()
    found = read(path)
    assert [line["step"] for line in found] == [2, 4, 6]
    assert set(found[0]) - {"time", "step"} <= set(monitor.metrics())
    assert found[-1]["memory/host_rss_bytes"] > 2**20
