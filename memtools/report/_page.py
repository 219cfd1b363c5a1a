"""The HTML page: one template that contains two scripts and two style sheets."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from memtools._base.text import shown
from memtools._record.figures import figures_of
from memtools._version import __version__
from memtools.errors import MemtoolsError
from memtools.report._payload import as_script, payload
from memtools.report._view import compare, names, title, view

if TYPE_CHECKING:
    import jinja2

    from memtools._record.record import Record

GENERATOR = b'<meta name="generator" content="memtools'


def page(records: list[Record], head: str | None) -> str:
    """Return the page as text, with this headline."""
    template = _template()
    from markupsafe import Markup

    style = _static("uplot.css") + _static("page.css")
    library, script = _static("uplot.js"), _static("page.js")
    figures = [figures_of(record) for record in records]
    short = names(records)
    data = payload(records, figures, short)
    parts = zip(short, records, figures, strict=True)
    views = [view(i, *part, data) for i, part in enumerate(parts)]
    return template.render(
        title=shown(head) if head else title(records),
        version=__version__,
        policy=policy(style, [library, script]),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        data=Markup(as_script(data)),
        views=views,
        comparison=compare(views, data),
    )


def policy(style: str, scripts: list[str]) -> str:
    """The content security policy: nothing is loaded, and only these parts run, by their hashes."""
    allowed = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _static(name: str) -> str:
    return (resources.files("memtools.report") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    try:
        import jinja2
    except ImportError:
        raise MemtoolsError(
            "the report needs jinja2, which is not installed; run python -m pip install jinja2"
        ) from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_static("page.html.j2"))
