"""How Sphinx builds the site of memtools: `make docs` writes it to build/docs.

    docs/**.md ──────────────────────────► MyST ────┐
    memtools, its docstrings ──► autodoc, napoleon ─┼──► furo ──► build/docs/html
    the parsers of memtools._cli ──► command_line ───┘

The pages also read well as plain Markdown files: only lists of pages and reference/ use directives.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "docs" / "_extensions")]

import links_out_of_docs  # noqa: E402

from memtools._version import __version__  # noqa: E402

project = "memtools"
author = "The memtools authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "command_line",
    "docstrings",
    "types_of_members",
    "links_out_of_docs",
]
root_doc = "index"
# A name in a signature, such as `type`, may match several members.
suppress_warnings = ["ref.python"]
exclude_patterns = ["_extensions", "_inventories", "**/.*", *links_out_of_docs.absent()]
# A toctree lists whole folders, so that a new page appears in it. Where a pattern matches no page,
# Sphinx issues a warning that has no name by which it could be suppressed.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: not str(record.msg).startswith("toctree glob pattern")
)

# Python's types in a signature link to its documentation. _inventories/shorten.py makes the file of
# their names, so that the site builds without a network. There is no such file for torch.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(PROJECT / "docs" / "_inventories" / "python.inv")),
}

myst_heading_anchors = 4
highlight_language = "text"  # of a block that names none, such as output

html_theme = "furo"
html_title = f"memtools {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

smartquotes = False  # they would turn --log into a dash
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # the hooks of a callback have none but their library's
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_default_options = {
    "members": True,
    # The members of the C types that these classes extend, and none of Python's own.
    "inherited-members": "object,str,tuple,dict,BaseException,Cache,TrainerCallback,Callback,"
    "Mapping,MutableMapping,Iterator,Sequence,Protocol",
}
toc_object_entries_show_parents = "hide"
autodoc_class_signature = "mixed"

# With -n, a name in a signature without a target is a warning. These have none on purpose.
nitpick_ignore_regex = [
    # torch and the libraries of the integrations: their inventories are on the network.
    ("py:class", r"(torch|transformers|lightning)\..*"),
    # Context managers and decorators: a program uses them and does not name their classes.
    ("py:class", r"memtools\.(_grad\.window\.Block|_cleanup\.cadence\.Span|_core\.Policy)"),
    ("py:class", r"memtools\._cleanup\.(managed\.Managing|generation\.Generating)"),
    # Inner parts of public objects; tests/meta/test_public.py lists them as PARTS.
    ("py:class", r"memtools\._grad\.(gradients\.Gradients|window\.Window|ranks\.Ranks)"),
    ("py:class", r"memtools\.(_allocators\.advice\.Seen|_record\.kinds\.Event)"),
    # Type variables, and aliases that an annotation names in quotes.
    ("py:class", r"memtools\.(_grad\.accumulator\._Function|_allocators\.settings\.T)"),
    ("py:class", r"memtools\.data\._cache\.[PR]"),
    ("py:class", r"Metric|Parameters|ProcessGroup"),
    ("py:class", r"(memtools\._trajectory\.plan\.)?Plan"),
]
