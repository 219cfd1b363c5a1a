"""The recipes of docs/guides/exporters.md, as they stand there, with a port that is free."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.markdown import anchor, sections
from tests.docs.pages import blocks_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "exporters.md"


def recipe(heading: str) -> dict[str, Any]:
    """Run the first program under a heading; return its names."""
    section = sections(PAGE.read_text())[anchor(heading)]
    program = next(block for block in blocks_of(section) if block.is_program)
    names: dict[str, Any] = {}
    exec(program.text.replace("9400", "0"), names)
    return names


def test_json_lines_have_finite_figures_and_rotate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger: logging.Logger = recipe("JSON lines")["lines"]
    [handler] = logger.handlers
    lines = [json.loads(line) for line in Path("memory.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(0, 100, 10))
    assert all(line["memory/host_rss_bytes"] > 0 and line["time"] > 1e9 for line in lines)
    handler.maxBytes = 100  # type: ignore[attr-defined]
    logger.info("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.jsonl", "memory.jsonl.1"]
    logger.removeHandler(handler)
    handler.close()


def test_prometheus_scrapes_each_figure_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = recipe("Prometheus")
    figures = {"memory/host_percent": 37.5, "memory/cuda1_free_bytes": 5.0}
    monkeypatch.setitem(names, "monitor", type("", (), {"metrics": lambda self: figures})())
    with names["server"] as server, urlopen(f"http://127.0.0.1:{server.server_port}") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
        server.shutdown()
    found = {(s.name, *s.labels.items()): s.value for one in families for s in one.samples}
    assert found == {
        ("memtools_host_percent",): 37.5,
        ("memtools_cuda_free_bytes", ("device", "1")): 5.0,
    }
    assert re.fullmatch(r"memory/\w+", families[0].documentation)
