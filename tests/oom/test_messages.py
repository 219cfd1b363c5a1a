"""Each form of message that memory ran out: what it is, its figures, and what follows."""

from __future__ import annotations

import io
import json

import pytest

from memtools import _cli as cli
from memtools._oom.log import search
from memtools._oom.message import FORMS
from memtools._oom.verdict import verdict_of
from tests.oom.messages import CASES, REFUSED, Case
from tests.report.reportcases import write


def log_of(text: str):
    return search(io.BytesIO(text.encode()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_figure_is_that_of_the_text(case: Case) -> None:
    log = log_of(case.text)
    message = log.main
    assert message is not None
    assert [one.kind for one in log.messages if one.weight >= 90] in ([], [message.kind])
    found = {name: getattr(message, name) for name in case.fields}
    assert found == case.fields


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_size_fragmentation_a_limit_or_unknown(case: Case) -> None:
    log = log_of(case.text)
    assert log.main is not None
    assert verdict_of(log.main, log.expandable).cause == case.cause


def test_every_form_has_a_message() -> None:
    seen = {log_of(case.text).main.kind for case in CASES}
    rest = {form.kind for form in FORMS} - seen
    assert rest == {"hpu"}  # no report at hand has the whole of one
    assert len(CASES) > 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_command_prints_it_and_the_same_facts_as_json(case: Case, tmp_path, capsys) -> None:
    path = tmp_path / "log.txt"
    path.write_text(case.text, "utf-8")
    assert cli.main(["explain", str(path)]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert "\nWhat to change\n  - " in text
    assert max(map(len, text.splitlines())) < 600
    assert cli.main(["explain", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cause"] == case.cause
    assert facts["why"] in text
    assert all(one["change"] in text for one in facts["changes"])
    tiers = {tier["name"]: tier["bytes"] for tier in facts["tiers"]}
    assert all(size >= 0 and name in text for name, size in tiers.items())


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_is_something_else_is_refused_in_a_sentence_that_says_what(text, tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text(text)
    assert cli.main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("memtools explain: ")
    assert REFUSED[text] in err


# --- exit codes, and a text with a record -------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "signal", "answer"),
    [
        (137, "SIGKILL", "likely"),
        (-9, "SIGKILL", "likely"),
        (247, "SIGKILL", "likely"),
        (135, "SIGBUS", "possible"),
        (134, "SIGABRT", "possible"),
        (-6, "SIGABRT", "possible"),
        (139, "SIGSEGV", "no"),
        (143, "SIGTERM", "no"),
        (130, "SIGINT", "no"),
        (129, "SIGHUP", "no"),
        (0, None, "no"),
        (1, None, "no"),
        (2, None, "no"),
        (124, None, "no"),
        (255, None, "no"),
        (128, None, "no"),
        (160, None, "no"),
        (-999, None, "no"),
        (10**30, None, "no"),
    ],
)
def test_an_exit_code_is_its_signal_and_whether_memory_can_be_the_reason(
    code, signal, answer, capsys
) -> None:
    assert cli.main(["explain", "--exit-code", str(code), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["code"], facts["signal"], facts["out_of_memory"]) == (code, signal, answer)
    assert cli.main(["explain", "--exit-code", str(code)]) == 0
    text = capsys.readouterr().out
    assert (signal or f"Exit code {code}:") in text
    assert ("What to do next" in text) == (answer != "no")


def test_a_text_and_the_record_of_its_run_are_explained_together(tmp_path, capsys) -> None:
    log, record = tmp_path / "train.log", tmp_path / "run.mem"
    log.write_text(CASES[0].text)
    write(str(record), steps=40)
    for names in ([log, record], [record, log]):
        assert cli.main(["explain", *map(str, names)]) == 0
        text = capsys.readouterr().out
        assert text.index("CUDA 0 ran out of memory") < text.index("run.mem: ")
        assert cli.main(["explain", "--json", *map(str, names)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["cause"] == "unknown"
        assert facts["record"]["steps"] == 39


@pytest.mark.parametrize("names", [["a", "a"], ["a", "a", "r"], ["r", "r"], ["a", "none"]])
def test_more_than_one_text_or_record_is_refused(names, tmp_path, capsys) -> None:
    (tmp_path / "a").write_text("Killed\n")
    write(str(tmp_path / "r"), steps=40)
    assert cli.main(["explain", *(str(tmp_path / name) for name in names)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_files_with_an_exit_code_are_refused(capsys) -> None:
    assert cli.main(["explain", "--exit-code", "137", "x"]) == 2
    assert "give files or --exit-code, not both" in capsys.readouterr().err
    assert cli.main(["explain", "--exit-code", "137", "--with", "del"]) == 2
    assert "--with needs a file" in capsys.readouterr().err
