"""How malloc and torch's CUDA allocator are set in this environment, for `memtools doctor`."""

from __future__ import annotations

from memtools._cli.facts import Fact, Section, known, unknown, why


def allocator_facts() -> Section:
    """The settings of this process, which are those of a program that is started in the same shell.
    Raises ImportError without _core."""
    from memtools import allocator_settings

    try:
        now = allocator_settings()
    except (OSError, ValueError) as error:
        return {"malloc": unknown(why(error))}
    host, cuda = now.host, now.cuda
    version = f" {host.version}" if host.version else ""
    advice = now.advice()
    caching = cuda.caching.value is not False
    return {
        "malloc": Fact(f"{host.name}{version}", f"{host.name}{version} ({host.path or 'unknown'})"),
        "malloc_arenas": _arenas(host.arenas, host.arena_limit, host.name),
        "malloc_settings": _listed(
            [f"{name}={setting.value} ({setting.source})" for name, setting in host.values.items()],
            f"none: {host.name}'s own",
        ),
        "cuda_settings": _listed(
            [f"{cuda.text.value} ({cuda.text.source})"] if cuda.text.value else [],
            "none: torch's own",
        ),
        "cuda_caching": Fact(caching, "yes" if caching else f"no ({cuda.caching.source} is set)"),
        "advice": Fact(len(advice), " ".join(advice) or "nothing to set"),
    }


def _arenas(count: int | None, limit: int, name: str) -> Fact:
    if count is None:
        return unknown(f"{name} does not say")
    return Fact(count, f"{count}, at most {limit}")


def _listed(parts: list[str], none: str) -> Fact:
    return known(", ".join(parts)) if parts else Fact(None, none)
