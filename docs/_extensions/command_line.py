"""The directive `command-line`: the commands of memtools out of their argparse parsers.

build_parser() ──► usage        ──► a block of code
               ├─► description  ──► paragraphs; those in columns are blocks of code
               └─► arguments    ──► a list with the help of each, its choices and its default
"""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from memtools._cli import build_parser


def inline(text: str) -> list[nodes.Node]:
    """Text in which `words` are code."""
    return [
        nodes.literal(part, part) if number % 2 else nodes.Text(part)
        for number, part in enumerate(text.split("`"))
        if part
    ]


def code(text: str) -> nodes.Node:
    return nodes.literal_block(text, text, language="text", classes=["highlight-text"])


def description(text: str) -> list[nodes.Node]:
    """The paragraphs of a command's description. One whose lines have columns keeps its lines."""
    found: list[nodes.Node] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        columns = re.search(r"\S {3,}\S", paragraph)
        plain = paragraph.replace("`", "")
        found.append(code(plain) if columns else nodes.paragraph("", "", *inline(paragraph)))
    return found


def names_of(action: argparse.Action) -> list[str]:
    """How an argument is written, like `--log PATH`."""
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.nargs == argparse.REMAINDER:
        value = "..."
    if isinstance(action.choices, list | tuple) and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return [str(action.metavar or action.dest)]
    return [f"{option} {value}".strip() for option in action.option_strings]


def usage(parser: argparse.ArgumentParser) -> str:
    formatter = parser.formatter_class(prog=parser.prog, width=88)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().strip()


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """The help of an argument, and its default where the help does not say it."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    default = action.default
    if default not in (None, False, [], argparse.SUPPRESS) and "default" not in text:
        text += f"; default: {default}"
    return text


def arguments(parser: argparse.ArgumentParser) -> nodes.Node:
    found = nodes.definition_list()
    by_kind = sorted(parser._actions, key=lambda action: bool(action.option_strings))
    for action in by_kind:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        names: list[nodes.Node] = []
        for name in names_of(action):
            names += [nodes.Text(", ")] * bool(names) + [nodes.literal(name, name)]
        text = nodes.paragraph("", "", *inline(help_of(action, parser)))
        found += nodes.definition_list_item(
            "", nodes.term("", "", *names), nodes.definition("", text)
        )
    return found


class CommandLine(Directive):
    """A section for each command of `memtools`."""

    def run(self) -> list[nodes.Node]:
        parser = build_parser()
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        sections: list[nodes.Node] = []
        for name, command in commands.choices.items():
            section = nodes.section(ids=[f"memtools-{name}"], names=[f"memtools {name}"])
            section += nodes.title("", f"memtools {name}")
            section += description(command.description)
            section += code(usage(command))
            section += arguments(command)
            sections.append(section)
        return sections


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
