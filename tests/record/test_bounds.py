"""The grammar of `memtools compare --fail`: what it means, and what it says of what it does not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtools._base.size import format_bytes
from memtools._base.text import shown
from memtools._record.bounds import EXAMPLES, Bound, parse_bounds

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "kb": 10**3}
NAMES = ("peak", "process", "device", "phase:forward", "phase:a = b, c: %")


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("peak=+5%", ("peak", True, True, 5.0)),
        (" peak = +0.5 % ", ("peak", True, True, 0.5)),
        ("process=+20MiB", ("process", True, False, 20 * 2**20)),
        ("device=2GiB", ("device", False, False, 2 * 2**30)),
        ("peak=+0", ("peak", True, False, 0.0)),
        ("growth=+1KiB/step", ("growth", True, False, 1024.0)),
        ("growth=+0.5 KiB / step", ("growth", True, False, 512.0)),
        ("growth=4KiB/step", ("growth", False, False, 4096.0)),
        ("seconds=+10%", ("seconds", True, True, 10.0)),
        ("seconds=+20ms", ("seconds", True, False, 0.02)),
        ("seconds=0.5s", ("seconds", False, False, 0.5)),
        ("phase:forward=+5%", ("phase:forward", True, True, 5.0)),
        ("phase:a,b=c=1MiB", ("phase:a,b=c", False, False, 2.0**20)),
        ("leak", ("leak", True, False, 0.0)),
    ],
)
def test_what_a_bound_means(text: str, bound: tuple[str, bool, bool, float]) -> None:
    assert parse_bounds(text) == [Bound(text.strip(), *bound)]


def test_several_bounds_stand_between_commas() -> None:
    found = parse_bounds("peak=+5%, phase:a,b=+1MiB,growth=+1KiB/step,leak")
    assert [one.name for one in found] == ["peak", "phase:a,b", "growth", "leak"]


def test_each_example_that_a_sentence_gives_is_one() -> None:
    for name, example in EXAMPLES.items():
        (found,) = parse_bounds(example)
        assert found.name == name.replace("NAME", "forward")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a bound is written like peak=+5%, got ''"),
        ("peak=+5%,", "a bound is written like peak=+5%, got ''"),
        ("growth", "a bound is written like growth=+1KiB/step, got 'growth'"),
        ("phase:forward", "a bound is written like phase:forward=+5%, got 'phase:forward'"),
        ("rss=+5%", "there is no figure 'rss': the names are peak, process, device, growth, "
         "seconds, phase:NAME, leak"),
        ("phase:=+5%", "there is no figure 'phase:': the names are peak, process, device, growth, "
         "seconds, phase:NAME, leak"),
        ("leak=1", "leak has no value: give leak alone, got 'leak=1'"),
        ("peak=5%", "a bound in percent must be a rise above base: give peak=+5%, got 'peak=5%'"),
        ("peak=+5", "a size needs a unit: give peak=+5%, got 'peak=+5'"),
        ("growth=+5%", "the growth of a run without a leak is near zero, so a percentage means "
                       "nothing: give growth=+1KiB/step, got 'growth=+5%'"),
        ("growth=+1KiB", "growth is per step: give growth=+1KiB/step, got 'growth=+1KiB'"),
        ("growth=+1KiB/s", "growth is per step: give growth=+1KiB/step, got 'growth=+1KiB/s'"),
        ("growth=x/step", "a bound of growth is written growth=+1KiB/step, or growth=4KiB/step as "
                          "an absolute limit, got 'growth=x/step'"),
        ("seconds=5", "a bound of seconds is written seconds=+10%, seconds=+20ms, or seconds=0.5s "
                      "as an absolute limit, got 'seconds=5'"),
        ("peak=-5%", "a bound of peak is written peak=+5%, peak=+20MiB, or peak=2GiB as an "
                     "absolute limit, got 'peak=-5%'"),
        ("peak=5 apples", "a bound of peak is written peak=+5%, peak=+20MiB, or peak=2GiB as an "
                          "absolute limit, got 'peak=5 apples'"),
        ("peak=99999999999TiB", "a bound must be smaller: no machine has that much, got "
                                "'peak=99999999999TiB'"),
        ("peak=+\u0665%", "a bound of peak is written peak=+5%, peak=+20MiB, or peak=2GiB as an "
                          "absolute limit, got 'peak=+\u0665%'"),
        ("a\x1b[2J=1", "there is no figure 'a\\x1b[2J': the names are peak, process, device, "
         "growth, seconds, phase:NAME, leak"),
    ],
)  # fmt: skip
def test_what_is_no_bound_is_one_sentence_with_the_remedy(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse_bounds(text)


@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.integers(1, 10**6),
    st.sampled_from(sorted(SIZES)),
    st.sampled_from(["", " "]),
)
def test_sizes_are_read_as_written(
    name: str, rise: bool, number: int, unit: str, space: str
) -> None:
    (found,) = parse_bounds(f"{name}={'+' * rise}{number}{space}{unit}")
    assert (found.name, found.rise, found.percent) == (name, rise, False)
    assert found.number == number * SIZES[unit]


@given(st.text(max_size=40) | st.text("+=%,./leakphwt:KMiBs0159 \0", max_size=40))
def test_any_text_is_bounds_or_one_sentence(text: str) -> None:
    try:
        found = parse_bounds(text)
    except ValueError as error:
        said = str(error)
        assert shown(said) == said
        assert len(said) < 400
        assert ", got '" in said or ": the names are " in said
    else:
        assert found
        for one in found:
            assert 0 <= one.number < 2**63
            assert format_bytes(one.number)
            assert parse_bounds(one.text) == [one]
