"""PrometheusExporter: what a scrape reads, by Prometheus' own parser, and what is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import memtools
from memtools.export import PrometheusExporter
from tests.export.metricsource import Figures, usual


def scrape(exporter: PrometheusExporter) -> str:
    with urllib.request.urlopen(exporter.url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


def parsed(exporter: PrometheusExporter) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(scrape(exporter))}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def test_names_units_and_labels_are_those_of_prometheus():
    with PrometheusExporter(usual()) as exporter:
        found = parsed(exporter)
    assert values(found["memtools_host_rss_bytes"]) == {(): 3.0 * 2**30}
    assert values(found["memtools_host_ratio"]) == {(): 0.375}
    assert values(found["memtools_steps_left"]) == {(): float("inf")}
    assert values(found["memtools_pressure_ratio"])[()] != 0  # NaN
    assert values(found["memtools_cuda_allocated_bytes"]) == {("0",): 1e9, ("1",): 2e9}
    assert values(found["memtools_up"]) == {(): 1.0}
    assert found["memtools_cuda_allocated_bytes"].samples[0].labels == {"device": "0"}
    assert {family.type for family in found.values()} == {"gauge"}
    assert found["memtools_host_rss_bytes"].documentation == "Resident memory of the process."
    assert all(family.documentation for family in found.values())


def test_it_reads_at_each_scrape_and_not_between():
    figures = usual()
    with PrometheusExporter(figures) as exporter:
        assert figures.asked == []
        parsed(exporter)
        figures.values["memory/host_rss_bytes"] = 5.0
        assert values(parsed(exporter)["memtools_host_rss_bytes"]) == {(): 5.0}
    assert figures.asked == [False, False]


def test_labels_of_the_run_are_on_every_value_and_counters_are_counters():
    labels = {"rank": "3", "job": 'a "b"\n\\c'}
    with PrometheusExporter(usual(), labels=labels, expert=True) as exporter:
        found = parsed(exporter)
    for family in found.values():
        for sample in family.samples:
            assert {key: sample.labels[key] for key in labels} == labels
    assert found["memtools_samples"].type == "counter"
    assert found["memtools_samples"].samples[0].name == "memtools_samples_total"


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("memory/cleanup_ms", "memtools_cleanup_seconds", 0.25),
        ("memory/overhead_ns", "memtools_overhead_seconds", 2.5e-7),
        ("memory/train step/two_bytes", "memtools_train_step_two_bytes", 250.0),
        ("loss", "memtools_loss", 250.0),
        ("memory/é", "memtools_value", 250.0),
        ("memory/percent", "memtools_ratio", 2.5),
    ],
)
def test_any_key_becomes_a_valid_name(key, name, value):
    figures = Figures()
    figures.values[key] = 250.0
    with PrometheusExporter(figures) as exporter:
        assert values(parsed(exporter)[name]) == {(): pytest.approx(value)}


def test_phases_are_a_label():
    figures = Figures()
    figures.values = {"memory/phase/a/b c/seconds": 1.5, "memory/phase/d/seconds": 2.5}
    with PrometheusExporter(figures) as exporter:
        (family,) = [f for name, f in parsed(exporter).items() if name != "memtools_up"]
    assert family.name == "memtools_phase_seconds"
    assert values(family) == {("a/b c",): 1.5, ("d",): 2.5}


def test_a_phase_whose_name_has_line_breaks_keeps_its_label():
    figures = Figures()
    figures.values = {"memory/phase/two\nlines/seconds": 3.0}
    with PrometheusExporter(figures) as exporter:
        family = parsed(exporter)["memtools_phase_seconds"]
    assert values(family) == {("two\nlines",): 3.0}


def test_keys_that_come_to_one_name_give_one_value():
    figures = Figures()
    figures.values = {"memory/a-b": 1.0, "memory/a_b": 2.0, "memory/cuda0_a": 3.0, "cuda_a": 4.0}
    with PrometheusExporter(figures) as exporter:
        found = parsed(exporter)
    assert values(found["memtools_a_b"]) == {(): 1.0}
    assert values(found["memtools_cuda_a"]) == {("0",): 3.0}


def test_a_source_that_raises_is_down_and_the_server_is_not():
    class Broken:
        def metrics(self, expert: bool = False) -> dict[str, float]:
            raise RuntimeError("stopped")

    with PrometheusExporter(Broken()) as exporter:
        assert {name: values(f) for name, f in parsed(exporter).items()} == {"memtools_up": {(): 0}}


def test_a_taken_port_is_said_and_nothing_is_left():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    with PrometheusExporter(usual()) as first:
        second = PrometheusExporter(usual(), port=first.port)
        with pytest.raises(OSError, match=f"port {first.port} of 127.0.0.1 is taken.*port=0"):
            second.start()
        second.stop()
        assert "memtools_up" in parsed(first)
    assert not set(threading.enumerate()) - before


def test_stopping_frees_the_port_and_the_thread_and_it_starts_again():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    exporter = PrometheusExporter(usual()).start()
    port, url = exporter.port, exporter.url
    assert not is_free(port)
    with pytest.raises(RuntimeError, match="runs already, at http://127.0.0.1"):
        exporter.start()
    exporter.stop()
    exporter.stop()
    assert is_free(port)
    assert not set(threading.enumerate()) - before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=30)
    assert repr(exporter) == "PrometheusExporter(http://127.0.0.1:0/metrics, stopped)"
    with PrometheusExporter(usual(), port=port) as again:
        assert "memtools_up" in parsed(again)


def test_it_listens_on_this_machine_only():
    with PrometheusExporter(usual()) as exporter:
        assert exporter._server.socket.getsockname()[0] == "127.0.0.1"


def test_a_forked_worker_does_not_hold_the_port():
    """The worker lives while the exporter stops, and is told to go when the port was looked at."""
    told, tell = os.pipe()
    exporter = PrometheusExporter(usual()).start()
    port = exporter.port
    if (pid := os.fork()) == 0:
        os.close(tell)
        os.read(told, 1)
        exporter.stop()  # of a thread that is not there: at once
        os._exit(0)
    assert "memtools_up" in parsed(exporter)
    exporter.stop()
    free = is_free(port)
    os.close(tell)
    os.close(told)
    assert os.waitpid(pid, 0)[1] == 0
    assert free


def test_forgotten_it_frees_the_port_and_the_thread_and_says_so():
    before = set(threading.enumerate())
    exporter = PrometheusExporter(usual()).start()
    port = exporter.port
    with pytest.warns(ResourceWarning, match="running PrometheusExporter.* was forgotten"):
        del exporter
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert is_free(port)


def test_a_program_that_forgets_it_ends():
    code = """
import memtools
from memtools.export import PrometheusExporter
class Figures:
    def metrics(self, expert=False): return {}
PrometheusExporter(Figures()).start()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_the_package_is_imported_when_it_starts_and_its_absence_is_explained():
    code = """
import sys, memtools.export
assert not {"prometheus_client", "torch", "numpy"} & set(sys.modules)
sys.modules["prometheus_client"] = None
class Figures:
    def metrics(self, expert=False): return {}
memtools.export.PrometheusExporter(Figures()).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs prometheus_client; pip install prometheus_client" in done.stderr


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"port": 70000}, ValueError, "port is at most 65,535, got 70,000"),
    ({"labels": {"device": "0"}}, ValueError, "'device' is no name for a label"),
    ({"labels": {"phase": "0"}}, ValueError, "neither device nor phase"),
    ({"labels": {"9a": "0"}}, ValueError, "'9a' is no name"),
    ({"labels": {"__a": "0"}}, ValueError, "'__a' is no name"),
    ({"source": 3}, TypeError, "PrometheusExporter takes an object with metrics.*got a int"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        PrometheusExporter(**{"source": usual(), **arguments})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="cannot listen at port 0 of 192.0.2.1"):
        PrometheusExporter(usual(), host="192.0.2.1").start()


def test_a_real_monitor_is_read_by_the_server_while_it_steps(tmp_path):
    with (
        memtools.MemoryMonitor(interval_ms=1) as monitor,
        PrometheusExporter(monitor, expert=True, labels={"rank": "0"}) as exporter,
    ):
        for _ in range(20):
            with monitor.phase("step"):
                monitor.step()
        found = parsed(exporter)
    rss = values(found["memtools_host_rss_bytes"])[("0",)]
    assert 2**20 < rss <= values(found["memtools_host_peak_bytes"])[("0",)] * 1.1
    assert values(found["memtools_phase_peak_bytes"])[("step", "0")] > 2**20
    assert values(found["memtools_steps"]) == {("0",): 20.0}
    assert 0 < values(found["memtools_host_ratio"])[("0",)] < 1
    assert values(found["memtools_up"]) == {("0",): 1.0}
