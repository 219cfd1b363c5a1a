"""How Sphinx builds the site of memtools: `make docs` writes it to build/docs.

    docs/**.md ──────────────────────────► MyST ────┐
    memtools, its docstrings ──► autodoc, napoleon ─┼──► furo ──► build/docs/html
    the parsers of memtools._cli ──► command_line ───┘

The pages are Markdown that reads as plain files too: directives stand in lists of pages and in
reference/ only.
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
# A type in a signature that several members are named after, as `type` is, is none of these.
suppress_warnings = ["ref.python"]
exclude_patterns = ["_extensions", "_inventories", "**/.*", *links_out_of_docs.absent()]
# A toctree takes whole folders, so that a page that is added appears. A folder may be empty, which
# Sphinx reports in a warning that has no name to be suppressed by.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: not str(record.msg).startswith("toctree glob pattern")
)

# Types of Python in a signature lead to its documentation. Their names are in a file of ours, so
# that the site is built without a network: _inventories/shorten.py makes it. No package has such a
# file of torch.
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

# With -n a name in a signature that leads nowhere is a warning. These lead nowhere on purpose.
nitpick_ignore_regex = [
    # torch and the libraries of the integrations: their inventories are on the network.
    ("py:class", r"(torch|transformers|lightning)\..*"),
    # Context managers and decorators: a program uses them and does not name their classes.
    ("py:class", r"memtools\.(_grad\.window\.Block|_cleanup\.cadence\.Span|_core\.Policy)"),
    ("py:class", r"memtools\._cleanup\.(managed\.Managing|generation\.Generating)"),
    # What public objects work with themselves; tests/meta/test_public.py lists these as PARTS.
    ("py:class", r"memtools\._grad\.(gradients\.Gradients|window\.Window|ranks\.Ranks)"),
    ("py:class", r"memtools\.(_allocators\.advice\.Seen|_record\.kinds\.Event)"),
    # Type variables, and aliases that an annotation names in quotes.
    ("py:class", r"memtools\.(_grad\.accumulator\._Function|_allocators\.settings\.T)"),
    ("py:class", r"memtools\.data\._cache\.[PR]"),
    ("py:class", r"Metric|Parameters|ProcessGroup"),
    ("py:class", r"(memtools\._trajectory\.plan\.)?Plan"),
]
