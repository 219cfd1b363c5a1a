"""The report opened in a headless chromium: `make test-pages`. Not part of `make test`, which has
no browser; tests/report/test_report.py takes the same page apart without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memtools
from memtools import _core
from memtools._base.peak import Layer, Span
from memtools._base.size import format_bytes
from memtools._record.kinds import Cleanup, Start
from memtools.report import write_report
from tests.pages.chromium import Browser, browser
from tests.report.reportcases import FINISHED, HOSTILE, LEAK, MIB, recorded, traced, write

EVENTS = [Start(), LEAK, *(("mark", text) for text in HOSTILE), Cleanup(("gc",), (3.0,), (), MIB),
          recorded(3, 10 * MIB), FINISHED]  # fmt: skip
SIZES = [(1400, False), (1400, True), (400, False), (400, True)]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> memtools.Record:
    path = str(tmp_path_factory.mktemp("record") / "run.mem")
    return memtools.read_record(write(path, grows=65536, device=True, events=EVENTS))


@pytest.fixture(scope="module")
def page(record, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    write_report(record, path)
    return path


@pytest.fixture(scope="module")
def several(record, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "several.html"
    write_report([record, record, record], path)
    return path


def scale(chrome: Browser) -> float:
    """The peak of what is in view, of the first line, in MiB."""
    found = chrome.value("document.querySelector('.legend output').textContent")
    assert found.endswith(" MiB")
    return float(found.removesuffix(" MiB"))


def readout(chrome: Browser) -> str:
    chrome.value("new Promise(done => setTimeout(done, 60))")
    found = chrome.value("document.querySelector('.at').textContent")
    assert isinstance(found, str)
    return found


def pixels(chrome: Browser, name: str, plot: str = ".plot") -> int:
    """How many pixels of the first such chart have a colour of the page's, or nearly."""
    script = """(() => {
        const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
        probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('%s');
        probe.fillRect(0, 0, 1, 1);
        const want = probe.getImageData(0, 0, 1, 1).data;
        const canvas = document.querySelector('%s canvas'), ctx = canvas.getContext('2d');
        const all = ctx.getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < all.length; i += 4) {
            const near = [0, 1, 2].every((k) => Math.abs(all[i + k] - want[k]) < 12);
            if (all[i + 3] > 200 && near) count++;
        }
        return count;
    })()"""
    return int(chrome.value(script % (name, plot)))


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_it_draws_loads_nothing_and_fits(chrome, page, several, width, dark):
    for path, top in ((page, "--s3"), (several, "--s2")):
        chrome.open(path, width, dark=dark)
        assert chrome.complaints() == []
        assert chrome.requests() == [path.as_uri()]
        assert not any(e.get("method") == "Page.javascriptDialogOpening" for e in chrome.happened)
        assert chrome.value("document.documentElement.scrollWidth") <= width
        assert pixels(chrome, top) > width / 3
        assert pixels(chrome, "--limit") > width / 8


def test_the_figures_below_the_chart_are_the_peaks(chrome, page, record):
    chrome.open(page, 1400)
    keys = "[...document.querySelector('.legend').children].map(b => b.innerText.split('\\n'))"
    found = dict(chrome.value(keys))
    values = {
        name: format_bytes(max(record.samples.values[name])) for name in ("rss", "cgroup_used")
    }
    assert found["Resident"] == values["rss"]
    assert found["Control group"] == values["cgroup_used"]


def test_the_keyboard_moves_zooms_and_resets(chrome, page):
    chrome.open(page, 1400)
    chrome.value("document.querySelector('.plot').focus()")
    assert readout(chrome) == "Below: the peak of each line in view"
    chrome.press("ArrowRight")
    first = readout(chrome)
    assert "step 1,5" in first
    chrome.press("ArrowRight")
    assert readout(chrome) != first
    chrome.press("Escape")
    whole = scale(chrome)
    chrome.press("+")
    for _ in range(9):
        chrome.press("PageUp")
    readout(chrome)
    assert scale(chrome) < whole  # the peak of the first half of a run that grows
    chrome.press("0")
    readout(chrome)
    assert scale(chrome) == whole


def test_lines_can_be_switched_and_steps_shown(chrome, page):
    chrome.open(page, 1400)
    button = "document.querySelectorAll('.legend button')[1]"  # private memory, which is off
    for pressed, least, most in ("false", 0, 0), ("true", 400, 10**6), ("false", 0, 0):
        assert chrome.value(f"{button}.getAttribute('aria-pressed')") == pressed
        assert least <= pixels(chrome, "--s1") <= most
        chrome.value(f"{button}.click()")
        readout(chrome)
    chrome.value("[...document.querySelectorAll('.bar button')][1].click()")
    readout(chrome)
    assert chrome.complaints() == []
    assert chrome.value("document.querySelectorAll('.bar button')[1].ariaPressed") == "true"


def test_an_event_of_the_table_is_shown_on_the_time_line(chrome, page):
    chrome.open(page, 1400)
    chrome.value("document.querySelectorAll('.jump')[1].click()")
    assert f"finding: {LEAK}" in readout(chrome)


def test_paper_is_light_and_the_screen_is_as_before_afterwards(chrome, page, tmp_path):
    chrome.open(page, 1400, dark=True)
    chrome.pdf(tmp_path / "run.pdf")
    assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")
    assert chrome.value("document.documentElement.className") == ""
    assert chrome.complaints() == []
    assert pixels(chrome, "--s3") > 400


# --- a recorded step ------------------------------------------------------------------------------

STACK = "[data-stack] .plot"


def stacked(chrome: Browser) -> dict[str, str]:
    """The legend of the stack, and what is said above it."""
    chrome.value("new Promise(done => setTimeout(done, 60))")
    keys = "[...document.querySelector('[data-stack] .legend').children].map("
    found: dict[str, str] = dict(chrome.value(keys + "b => b.innerText.split('\\n'))"))
    found["at"] = chrome.value("document.querySelector('[data-stack] .at').textContent")
    return found


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_a_recorded_step_is_drawn_in_the_shares_of_its_parts(chrome, page, width, dark):
    chrome.open(page, width, dark=dark)
    parameters, state, unseen = (
        pixels(chrome, name, STACK) for name in ("--s0", "--s3", "--unseen")
    )
    # 4, 5 and 1 times the same: four columns of parameters, 0, 2, 2 and 1 of state, one of no name
    assert parameters > 10 * width
    assert state / parameters == pytest.approx(5 / 4, rel=0.1)
    assert unseen / parameters == pytest.approx(1 / 4, rel=0.2)


def test_the_figures_of_a_stack_are_those_of_its_peak_or_of_the_cursor(chrome, page):
    chrome.open(page, 1400)
    peak = {"parameters": "10.0 MiB", "optimizer state": "20.0 MiB", "not seen": "10.0 MiB",
            "at": "Below: at the peak, backward, 40.0 MiB"}  # fmt: skip
    assert stacked(chrome) == peak
    chrome.value(f"document.querySelector('{STACK}').focus()")
    chrome.press("ArrowRight")  # to the peak, and on
    chrome.press("ArrowRight")
    assert stacked(chrome) == peak | {"not seen": "0 B", "at": "backward, 30.0 MiB · 3 of 4"}
    for _ in range(3):
        chrome.press("ArrowRight")
    assert stacked(chrome)["at"] == "optimizer, 20.0 MiB · 4 of 4"
    chrome.press("Escape")
    assert stacked(chrome) == peak


def test_what_comes_after_the_optimizers_step_has_no_name_below_the_stack(chrome, tmp_path):
    spans = (Span("forward", 1), Span("optimizer", 1), Span("", 2))
    path = write(str(tmp_path / "run.mem"), events=[recorded(3, MIB, spans=spans)])  # type: ignore[list-item]
    write_report(memtools.read_record(path), tmp_path / "run.html")
    chrome.open(tmp_path / "run.html", 1400)
    chrome.value(f"document.querySelector('{STACK}').focus()")
    for at in ("optimizer, 4.0 MiB · 2 of 4", "after the optimizer's step, 3.0 MiB · 3 of 4"):
        chrome.press("ArrowRight")
        assert stacked(chrome)["at"] == at
    assert chrome.complaints() == []


def test_a_layer_of_a_stack_can_be_turned_off(chrome, page):
    chrome.open(page, 1400)
    before = pixels(chrome, "--s3", STACK)
    chrome.value("document.querySelectorAll('[data-stack] .legend button')[0].click()")
    assert stacked(chrome)["parameters"] == "\u2013"
    assert pixels(chrome, "--s0", STACK) == 0
    assert pixels(chrome, "--s3", STACK) > before
    for number in (1, 2):
        chrome.value(f"document.querySelectorAll('[data-stack] .legend button')[{number}].click()")
    assert stacked(chrome)["at"] == "Below: at the peak, backward, 40.0 MiB"
    assert chrome.complaints() == []


def test_another_change_can_be_chosen_for_the_traced_step(chrome, tmp_path):
    events = [recorded(3, MIB, traced=traced())]
    path = write(str(tmp_path / "run.mem"), events=events)  # type: ignore[arg-type]
    write_report(memtools.read_record(path), tmp_path / "run.html")
    chrome.open(tmp_path / "run.html", 1400)
    buttons = "document.querySelectorAll('[data-stack=\"t0-1\"] .legend button')"
    keys = f"[...{buttons}].map(b => b.innerText)"
    assert chrome.value(keys) == ["parameters\n40.0 MiB"]
    before = chrome.value("document.querySelector('[data-stack=t0] canvas').height")
    choose = "const s = document.querySelector('select'); s.value = 't0-2'; "
    chrome.value(f"(() => {{ {choose} s.dispatchEvent(new Event('change')); }})()")
    assert chrome.value(keys) == ["parameters\n40.0 MiB", "optimizer's temporaries\n20.0 MiB"]
    assert chrome.value("document.querySelector('[data-stack=t0-1] canvas').height") == before
    assert chrome.complaints() == []
    chrome.open(tmp_path / "run.html", 390)
    assert chrome.value("document.documentElement.scrollWidth") <= 390  # its tables fit


@pytest.mark.parametrize("columns", [1, 2, 128])
def test_steps_of_any_length_are_drawn(chrome, columns, tmp_path):
    size = 4 * MIB + MIB // 4  # in the middle of two figures
    step = {
        "layers": (Layer("gradients", (size, *[0] * (columns - 1))),),
        "spans": tuple(Span(("forward", "backward")[n % 2], 1) for n in range(columns)),
    }
    path = write(str(tmp_path / "run.mem"), events=[recorded(3, MIB, **step)])  # type: ignore[list-item]
    write_report(memtools.read_record(path), tmp_path / "run.html")
    chrome.open(tmp_path / "run.html", 1400)
    assert chrome.complaints() == []
    assert pixels(chrome, "--s2", STACK) > 100_000
    assert stacked(chrome)["gradients"] == format_bytes(size)


def test_ten_million_samples_fit_into_two_mebibytes(chrome, tmp_path, capsys):
    path, out = str(tmp_path / "long.mem"), tmp_path / "long.html"
    with _core.RecordWriter(path, [("step", ""), ("rss", "B"), ("heap_used", "B")]) as writer:
        append = writer.append
        for i in range(10_000_000):
            append(10**15 + i * 10**6, [i >> 4, (i & 1023) << 20 | 5, 1 << 28])
        append(10**15 + 10**13, [10**6, 3 << 30, 1 << 28])
        for i in range(200_000):
            append(10**15 + 10**13 + i * 10**6, [10**6, 1 << 30, 1 << 28])
    write_report(memtools.read_record(path), out)
    assert out.stat().st_size < 2 * MIB
    chrome.open(out, 1400)
    assert "3.00 GiB" in chrome.value("document.querySelector('.legend').innerText")
    ready = chrome.value("document.documentElement.dataset.ready")
    with capsys.disabled():
        size = format_bytes(out.stat().st_size)
        print(f"\n10,200,001 samples: {size}, drawn {ready} ms after opening")
