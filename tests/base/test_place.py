"""Lines of a program, and how they are named."""

from __future__ import annotations

import pytest

from memtools._base.place import Place, line_of, name_of


@pytest.mark.parametrize("file", ["train.py", "work in progress/train.py", "<string>"])
@pytest.mark.parametrize("function", ["", "fit", "Trainer.fit.<locals>.<lambda>"])
def test_a_line_is_its_name_without_the_function(file: str, function: str) -> None:
    assert line_of(name_of(Place(file, 47, function))) == f"{file}:47"


@pytest.mark.parametrize("name", ["Trainer.model.head", "a parameter in use", ""])
def test_what_is_not_the_name_of_a_line_stays(name: str) -> None:
    assert line_of(name) == name


def test_of_a_name_that_was_cut_nothing_is_left_of_the_function() -> None:
    assert line_of("train.py:47 in fit"[:-3]) == "train.py:47"
