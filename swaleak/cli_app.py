"""How the command line is read, and how a command ends: a report, an exit code, one error line.

The only place where an error becomes an exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from swaleak.cli_options import Format
from swaleak.errors import Interrupted, StandInError, SwaleakError, UsageError

if TYPE_CHECKING:
    from swaleak.report.model import Report


class Command(TyperCommand):
    """A command whose options lose nothing, and whose help says what there is to type."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises ``UsageError`` for an option that is given twice.

        Typer keeps the last value and drops the first without a word.
        """
        if not context.resilient_parsing:  # else a shell asks how to go on
            _, _, order = self.make_parser(context).parse_args(args=list(args))
            for option, times in Counter(order).items():
                if times > 1 and _takes_one(option):
                    raise UsageError(f"{'/'.join(option.opts)}: given {times} times, takes one")
        return super().parse_args(context, args)

    def get_params(self, context: Any) -> Any:
        """Return arguments and options."""
        return _tidied(super().get_params(context))

    def collect_usage_pieces(self, context: Any) -> list[str]:
        """Return what the usage line shows: every Typer puts brackets of its own around these."""
        params = self.get_params(context)
        arguments = [str(p.metavar) for p in params if p.param_type_name == "argument"]
        return [self.options_metavar or "", *arguments]


class Commands(TyperGroup):
    """Commands, sorted, that Ctrl-C stops like any other error: Typer's releases differ there."""

    def invoke(self, context: Any) -> Any:
        """Run a command. Raises ``Interrupted``."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise Interrupted from None

    def list_commands(self, context: Any) -> list[str]:
        """Return the names of the commands, sorted."""
        return sorted(super().list_commands(context))

    def get_params(self, context: Any) -> Any:
        """Return options."""
        return _tidied(super().get_params(context))


class App(typer.Typer):
    """An application whose commands are ``Command``s."""

    def command(
        self, name: str | None = None, **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Return a decorator, as ``typer.Typer.command`` does."""
        return super().command(name, cls=Command, **settings)


def given(context: typer.Context, *names: str) -> list[str]:
    """Return those of these parameters that were given on the command line."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [name for name, source in sources if source and source.name == "COMMANDLINE"]


def _takes_one(param: Any) -> bool:
    """Whether a second value would take the place of the first; a flag says the same twice."""
    option = param.param_type_name == "option"
    return option and not (param.multiple or param.is_flag or param.count)


def _tidied(params: Any) -> Any:
    """Return ``params``, without what some Typers put beside them in the help.

    That is ``<bool>`` beside every flag, ``<list[str]>`` beside an argument that its name explains,
    and ``[default: None]`` beside what has no default.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        if param.default is None:
            param.show_default = False
    return params


# reports


def check_output(output: Path | None, *, runs: bool = False) -> None:
    """Raise ``UsageError`` if no report can be written there; see ``render.check_ending``."""
    if output is not None:
        from swaleak.report.render import check_ending

        check_ending(output, runs=runs)


def is_looked_at(format: Format, output: Path | None) -> bool:
    """Whether a person will see the report: on a terminal, or as a picture."""
    picture = output is not None and output.suffix.lower() in (".svg", ".html")
    return picture or (format is Format.table and sys.stdout.isatty())


def finish(
    report: Report, format: Format, output: Path | None = None, code: int | None = None
) -> NoReturn:
    """Print the report, write it if asked to, and leave: with ``code``, or 0 or 1 as it is ok."""
    print_report(report, format, output)
    raise typer.Exit(int(not report.ok) if code is None else code)


def print_report(report: Report, format: Format, output: Path | None = None) -> None:
    """Print the report, and write it if asked to."""
    from swaleak.report.render import as_json, as_markdown, print_to, write

    if format is Format.json:
        sys.stdout.write(as_json(report))
    elif format is Format.markdown:
        sys.stdout.write(as_markdown(report))
    else:
        from rich.console import Console

        print_to(report, Console(highlight=False))
    if output is not None:  # last, so that a disk that is full takes nothing from the reader
        sys.stdout.flush()
        write(report, output)


# time limits, interrupts

_place = [""]  # what is being run, for whoever stops it


@contextmanager
def interruptible(where: str) -> Iterator[None]:
    """Let Ctrl-C and ``--timeout`` say what they stop: code of a target may hang.

    Raises ``Interrupted``.
    """
    _place.append(where)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(where) from None
    finally:
        _place.pop()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End this process with exit code 124 after so many seconds, whatever it is doing."""
    if seconds is None:
        yield
        return

    def stop() -> None:
        where = f": {_place[-1]}" if _place[-1] else ""
        print(f"swaleak: timed out after {seconds:g} s{where}", file=sys.stderr, flush=True)
        os._exit(124)  # a target that hangs may catch every exception

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# exits


class _Pipe(io.FileIO):
    """A standard stream whose reader may leave: `swaleak … | head` ends as it would without.

    Rich and Typer leave with 1 themselves where they are told of a broken pipe, so none of them is.
    """

    def write(self, data: Any) -> int:
        """Write ``data``; once nobody reads on, to nowhere."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def run(app: typer.Typer) -> NoReturn:
    """Run the command line, and leave."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    _prepare_streams()
    if not os.environ.get("COLUMNS", "").strip("0"):  # a 0 says that nobody knows, not: no room
        os.environ.pop("COLUMNS", None)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except (SwaleakError, StandInError) as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):  # before any command
        _fail(str(Interrupted()), Interrupted.exit_code)
    except OSError as error:
        _fail(_disk(error), 2)
    except MemoryError:
        _fail("out of memory", 2)
    except Exception as error:
        # torch's own; it may not be imported here
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            _fail("out of memory: " + " ".join(str(error).split()), 2)
        usage = getattr(error, "format_message", None)  # Typer's own: an option it cannot read
        if usage is None:
            raise
        _add_value(error)
        _fail(" ".join(usage().split()), 2)
    sys.exit(code or 0)


def _prepare_streams() -> None:
    if sys.stdout is None:  # `swaleak … >&-`
        sys.stdout = io.StringIO()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if name == "stdout":  # a name that the terminal cannot show
            stream.reconfigure(errors="replace")
        with contextlib.suppress(OSError):  # what stands in for a stream has no number
            pipe = _Pipe(stream.fileno(), "wb", closefd=False)
            again = io.TextIOWrapper(
                pipe if stream.write_through else io.BufferedWriter(pipe),  # python -u
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, again)


def _add_value(error: Any) -> None:
    """Put the value into the message about it.

    Newer Typers pass on the words of the validator beneath them, `Input should be …`; the older
    ones name the value themselves.
    """
    cause = error.__cause__
    found: dict[str, Any] = {}
    while hasattr(cause, "errors"):  # of a list: an error about an item, inside one about it all
        found = cause.errors()[0]
        cause = found.get("ctx", {}).get("error")
    if found.get("type") == "int_parsing":
        error.message = f"{found['input']!r} is not a whole number."
    elif found.get("type") == "value_error":
        error.message = str(cause)
    elif found:
        said = str(found["msg"]).removeprefix("Input should be ")
        error.message = f"{found['input']} is not {said}."


def _disk(error: OSError) -> str:
    """Return a sentence for a file that cannot be used, or for an output that takes no more."""
    if error.filename is None:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # or Python tries once more as it ends, and complains at length
    return f"{error.filename or 'standard output'}: {error.strerror or error}"


def _fail(message: str, code: int) -> NoReturn:
    print(f"swaleak: {message}", file=sys.stderr)
    sys.exit(code)
