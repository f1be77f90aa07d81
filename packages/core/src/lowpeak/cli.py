"""The ``lowpeak`` command. Other distributions add subcommands by the entry-point group below."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from lowpeak.environment import environment_markdown

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["COMMAND_GROUP", "main"]

# An entry point of this group has the name of a subcommand, and is a function that takes what
# add_subparsers() returned, adds that subcommand, and sets its default `run`: a function of the
# parsed options that returns the exit status.
COMMAND_GROUP = "lowpeak.commands"


def print_environment(_options: argparse.Namespace) -> int:
    """Print the environment as a Markdown list."""
    print(environment_markdown())
    return 0


def add_environment(subcommands: "Subcommands") -> None:
    """Add ``lowpeak env``."""
    summary = "print platform, versions and devices as Markdown, for bug reports"
    parser = subcommands.add_parser("env", help=summary, description=summary)
    parser.set_defaults(run=print_environment)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with our own subcommands and those that other distributions registered.

    Of those only ``chosen`` is loaded: `lowpeak env` and `lowpeak --help` must work, and at once,
    where another distribution is slow to import or fails to.
    """
    parser = argparse.ArgumentParser(prog="lowpeak")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_environment(subcommands)
    for entry in sorted(entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name):
        if entry.name == chosen:
            add_subcommand: Callable[[Subcommands], None] = entry.load()
            add_subcommand(subcommands)
        else:
            source = entry.dist.name if entry.dist is not None else entry.module
            subcommands.add_parser(
                entry.name, help=f"of {source}: see `lowpeak {entry.name} --help`"
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``lowpeak`` command and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = build_parser(given[0] if given else None).parse_args(given)
    status: int = options.run(options)
    return status
