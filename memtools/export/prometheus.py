"""PrometheusExporter: the figures over HTTP, read when they are asked for.

Prometheus --GET /metrics--> thread of the server --> collect() --> monitor.metrics()
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from memtools._base import process
from memtools._base.mapping import file_of
from memtools._base.metrics import MetricsSource, check_source
from memtools._base.number import whole_number
from memtools._base.text import brief
from memtools.export.names import Sample, check_labels, samples_of

if TYPE_CHECKING:
    from prometheus_client import Metric

_INSTALL = "pip install prometheus_client"


class PrometheusExporter:
    """Serves `source.metrics()` in Prometheus' text format, on this machine only by default.

    Names follow Prometheus' rules: `memory/host_rss_bytes` is `memtools_host_rss_bytes`, a percent
    is a ratio of 0 to 1, `memory/cuda1_free_bytes` is `memtools_cuda_free_bytes{device="1"}`.
    `memtools_up` is 1, or 0 if the source raised an exception. Between scrapes nothing runs. The
    exporter has a registry of its own, so that metrics of the program itself stay apart. A forked
    child closes its copy of the socket.

        with monitor, PrometheusExporter(monitor, port=9400) as exporter:
            print(exporter.url)

    Args:
        source: the monitor, or another object with `metrics()`, which the server's thread calls.
        port: the port to listen at, 0 to 65,535. 0, the default, takes a free one; the attribute
            `port` has it after the start.
        host: the address to listen at; `"127.0.0.1"`, this machine alone, by default. There is no
            password: `"0.0.0.0"` shows the figures, and nothing else, to everybody who reaches
            this machine.
        labels: labels that every value gets, like `{"rank": "0"}`. None, the default: no labels.
        expert: serve all figures; False, the default, serves the usual ones.

    Raises:
        ValueError: a label's name is not allowed by Prometheus or is `device`, or the port is out
            of range.
        TypeError: `source` has no `metrics()`.
    """

    def __init__(
        self,
        source: MetricsSource,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        labels: Mapping[str, str] | None = None,
        expert: bool = False,
    ) -> None:
        check_source(source, "PrometheusExporter")
        port = whole_number("port", port, 0, 65535)
        self._source, self._asked, self._host, self._expert = source, port, host, expert
        self._labels = check_labels(labels or {})
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Listen from now on.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            RuntimeError: it runs already.
            ImportError: prometheus_client is not installed.
        """
        if self._server is not None:
            raise RuntimeError(f"the exporter runs already, at {self.url}; stop() it first")
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ImportError(f"PrometheusExporter needs prometheus_client; {_INSTALL}") from error
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        try:
            with process.signals_blocked():  # threads of its requests inherit that
                server, thread = start_http_server(self._asked, self._host, registry)
        except OSError as error:
            raise _explained(error, self._host, self._asked) from error
        except UnicodeError:
            raise ValueError(
                f"host is a name or an address of this machine, got '{brief(self._host)}'"
            ) from None
        _watch(server)
        self._server, self._thread = server, thread
        _RUNNING.add(self)
        return self

    def stop(self) -> None:
        """Free the port and the thread; takes up to half a second. May be called again."""
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        _RUNNING.discard(self)
        if server is None or thread is None:
            return
        alive = thread.is_alive()  # not in a forked child
        _close(server, alive)
        if alive:
            thread.join()

    def __del__(self) -> None:
        """As a file that is forgotten open. Whatever thread comes here, it does not wait: it may be
        the server's own. When the interpreter ends, so does the server."""
        server = getattr(self, "_server", None)
        if server is None or sys.is_finalizing():
            return
        warnings.warn(f"running {self!r} was forgotten", ResourceWarning, stacklevel=2, source=self)
        alive = self._thread is not None and self._thread.is_alive()
        with process.signals_blocked():
            threading.Thread(target=_close, args=(server, alive), daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at; what was asked for while it does not run."""
        return self._asked if self._server is None else int(self._server.server_port)

    @property
    def url(self) -> str:
        """What to tell Prometheus to scrape."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    def collect(self) -> Iterator[Metric]:
        """What a scrape reads now, as prometheus_client's metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = list(self._labels)
        families: dict[str, Any] = {}
        for sample in self._samples():
            if sample.name not in families:
                kind = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
                keys = [*names, *sample.labels]
                families[sample.name] = kind(sample.name, sample.help, labels=keys)
            values = [*self._labels.values(), *sample.labels.values()]
            families[sample.name].add_metric(values, sample.value)
        yield from families.values()

    def _samples(self) -> list[Sample]:
        try:
            metrics = self._source.metrics(self._expert)
        except Exception:  # the program's own source: a scrape must not end in a traceback
            metrics = {}
            up = 0.0
        else:
            up = 1.0
        alive = Sample("memtools_up", "1 when the figures could be read, else 0.", {}, up, False)
        return [*samples_of(metrics), alive]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"PrometheusExporter({self.url}{'' if self._server else ', stopped'})"


def _watch(server: Any) -> None:
    """Where the program closes the socket's descriptor, what has its number next would be polled
    without end, and connections to it would be taken: the server's thread ends instead."""
    server.meant, accept = file_of(server.fileno()), server.get_request

    def get_request() -> Any:
        if not _owns_socket(server):
            raise SystemExit  # which ends a thread without a traceback
        return accept()

    server.get_request = get_request


def _owns_socket(server: Any) -> bool:
    """Whether the server has its socket. A number that is the program's now is left alone."""
    if server.fileno() >= 0 and file_of(server.fileno()) != server.meant:
        server.socket.detach()
        logging.getLogger("memtools").warning(
            "the program has closed the socket of port %s (os.closerange?); Prometheus gets no "
            "figures until the exporter is stopped and started",
            server.server_port,
        )
    return bool(server.fileno() >= 0)


def _close(server: Any, alive: bool) -> None:
    if alive:
        server.shutdown()
    _owns_socket(server)
    server.server_close()


class _Collector:
    """What the registry holds. Weak, so that a forgotten exporter and its monitor can go."""

    def __init__(self, exporter: PrometheusExporter) -> None:
        self._exporter = weakref.ref(exporter)

    def collect(self) -> Iterator[Metric]:
        exporter = self._exporter()
        if exporter is not None:
            yield from exporter.collect()

    def describe(self) -> list[Metric]:
        return []  # or the registry would read the figures once at the start


def _explained(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE:
        text = f"port {port} of {host} is taken by another server; pass port=0 for a free one"
    elif error.errno == errno.EACCES:
        text = f"port {port} of {host} is for root only; pass one from 1024 on"
    else:
        text = f"cannot listen at port {port} of {brief(host)}: {error.strerror or error}"
    return type(error)(error.errno or errno.EADDRNOTAVAIL, text)


_RUNNING: weakref.WeakSet[PrometheusExporter] = weakref.WeakSet()


def _close_in_child() -> None:
    """A worker that inherits the socket would hold the port when the training has ended."""
    for exporter in list(_RUNNING):
        server = exporter._server
        if server is not None and _owns_socket(server):
            server.socket.close()  # this process's descriptor; the parent's goes on listening


process.at_fork(_close_in_child)
