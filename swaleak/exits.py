"""How a command ends: an exit code, and one line on standard error for whatever went wrong."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from typing import Any, NoReturn

import typer

from swaleak.errors import Interrupted, SwaleakError


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
    """Run the command line. The only place where an error becomes an exit code."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    _prepare_streams()
    if not os.environ.get("COLUMNS", "").strip("0"):  # a 0 says that nobody knows, not: no room
        os.environ.pop("COLUMNS", None)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SwaleakError as error:
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
        _tell_the_value(error)
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


def _tell_the_value(error: Any) -> None:
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
