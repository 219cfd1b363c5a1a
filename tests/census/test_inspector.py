"""Inspector: which collections are worth a look."""

from __future__ import annotations

import pytest

from memtools._census.cycles import Collected, Inspector


def test_inspections_are_advised_after_collections_that_found_much():
    def run(inspector: Inspector, much: str) -> str:
        said = ""
        for found in much:
            due = inspector.due()
            said += "I" if due else "."
            objects = 1_000 if found == "m" else 999
            inspector.saw(Collected(objects, 0 if due else None, None, (), 1.0))
        return said

    assert run(Inspector(), "." * 30) == "." * 30
    assert run(Inspector(), "m" * 26) == ".III" + 2 * ".........I" + ".."
    assert run(Inspector(), "m.m.m.m.m.m.") == ".I.I.I......"
    quiet = Inspector()
    assert run(quiet, "mmmm") == ".III"
    assert run(quiet, "..........") == "." * 10
    assert run(quiet, "mmmm") == ".III"


@pytest.mark.parametrize(
    ("gain", "device", "due"), [(0.0099, 0, False), (0.01, 0, True), (0.0, 1, True)]
)
def test_an_inspection_is_due_after_a_gain_of_memory_too(gain, device, due):
    inspector = Inspector()
    inspector.saw(Collected(5, None, None, (), 1.0), gain, device)
    assert inspector.due() is due
