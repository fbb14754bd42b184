"""The command line of gradwire."""

from __future__ import annotations

import errno
import os
import sys
from difflib import get_close_matches
from io import TextIOWrapper
from typing import Annotated

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownCommandError, UnusedCliTokensError
from rich.console import Console
from rich.text import Text

from gradwire import own
from gradwire.cli.analyze import analyze
from gradwire.cli.arguments import shown
from gradwire.cli.bench import bench
from gradwire.cli.check import check
from gradwire.cli.codecs import codecs, gpu, kernels
from gradwire.cli.costs import advise, simulate
from gradwire.cli.doctor import doctor
from gradwire.cli.frontier import frontier
from gradwire.cli.lab import lab
from gradwire.cli.methods import methods
from gradwire.cli.recipes import recipes
from gradwire.cli.suite import reproduce
from gradwire.errors import GradwireError

USAGE_ERROR = 2
INTERRUPTED = 130

app = App(
    name="gradwire",
    help="Data-parallel training, cheap on the wire: every gradient compressor behind one line.",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(show_default=shown),
)
app.command(methods)
app.command(recipes)
app.command(check)
app.command(analyze)
app.command(frontier)
app.command(advise)
app.command(simulate)
bench.command(kernels)
bench.command(codecs)
bench.command(gpu)
app.command(bench)
app.command(lab)
app.command(reproduce)
app.command(doctor)


app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def run(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    own_files: Annotated[list[str] | None, Parameter(name="--import", negative=())] = None,
) -> None:
    """Run a command.

    Args:
        words: The command, and what it is given.
        own_files: A file or module of your own that registers methods, routes and so on, for any command; may be
            repeated. The environment variable GRADWIRE_IMPORT lists some, too.
    """
    own.add(own_files or ())
    app(words, exit_on_error=False, print_error=False, result_action="return_value")


def main() -> int:
    """Runs the command line; returns the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # or a plus-minus sign would end a command where there is no UTF-8
    try:
        app.meta(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
        if sys.stdout is not None:  # as where it was closed before the start
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left would fail again at the end
        print(f"error: {error}; make room where the output goes, and run it again", file=sys.stderr)
        return USAGE_ERROR
    except (GradwireError, CycloptsError) as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), _said(error)), soft_wrap=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _said(error: Exception) -> str:
    """What an error says, and what was probably meant."""
    command = " ".join(["gradwire", *(getattr(error, "command_chain", None) or ())])
    if isinstance(error, UnusedCliTokensError):
        given = ", ".join(map(repr, error.unused_tokens or ()))
        return f"{given} has no place here; {command} --help says what has"
    if isinstance(error, MissingArgumentError) and error.argument is not None and not error.keyword:
        return f"{error.argument.name.strip('-').upper()} is missing; {command} --help says what it is"
    if isinstance(error, UnknownCommandError):
        from gradwire.methods import names

        word = sys.argv[1] if len(sys.argv) > 1 else ""
        if near := get_close_matches(word.partition(":")[0], names(), n=1, cutoff=0.8):
            return f"{error} For the method {near[0]}: gradwire methods {near[0]}, or gradwire analyze {near[0]}."
    return str(error)
