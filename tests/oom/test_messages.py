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
def test_size_fragmentation_or_that_it_cannot_be_told(case: Case) -> None:
    log = log_of(case.text)
    assert log.main is not None
    assert verdict_of(log.main, log.expandable).cause == case.cause


def test_every_form_has_a_message() -> None:
    seen = {log_of(case.text).main.kind for case in CASES}
    rest = {form.kind for form in FORMS} - seen
    assert rest == {"hpu", "other"}  # no report at hand has the whole of one
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
