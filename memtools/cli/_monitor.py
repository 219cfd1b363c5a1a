"""What the memory monitor can read on this machine, by the native probe itself."""

from __future__ import annotations

from pathlib import Path

from memtools.cli._system import ROOT, Fact, Section, guarded, known, no, unknown, why, yes

KEYS = ("limit_source", "pressure_readings", "peak_reset")


def monitor_facts(root: Path = ROOT) -> Section:
    """Whose limit counts, whether stalls can be read, and whether peaks are exact."""
    try:
        from memtools import _core
        from memtools._hostmem import limit_source
    except ImportError as error:
        return dict.fromkeys(KEYS, unknown(why(error)))
    probe = _core.Probe(str(root), True)
    sample = probe.read()

    def source() -> Fact:
        text = limit_source(probe, sample.total)
        return Fact(None, text) if sample.cgroup_limit is None else known(text)

    def pressure() -> Fact:
        path, of_host = probe.source()[5:]
        if sample.pressure is None:
            return no(f"no {path}" if path else "no v2 control group is mounted")
        return yes("of the whole machine: this is the root group" if of_host else f"{path}")

    def peak() -> Fact:
        exact = probe.reset_peak()
        return yes() if exact else no("/proc/self/clear_refs cannot be written: peaks are at least")

    return dict(zip(KEYS, map(guarded, (source, pressure, peak)), strict=True))
