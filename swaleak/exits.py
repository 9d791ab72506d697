"""How a command ends: an exit code, and one line on standard error for whatever went wrong."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from swaleak.errors import Interrupted, SwaleakError


class Commands(TyperGroup):
    """Commands that Ctrl-C stops like any other error; what Typer does differs by its release."""

    def invoke(self, context: Any) -> Any:
        """Run a command. Raises ``Interrupted``."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise Interrupted from None


def run(app: typer.Typer) -> NoReturn:
    """Run the command line. The only place where an error becomes an exit code."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if sys.stdout is None:  # `swaleak … >&-`
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SwaleakError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):  # before any command
        _fail(str(Interrupted()), Interrupted.exit_code)
    except BrokenPipeError:  # `swaleak … | head`: nobody reads on
        sys.stderr.close()
        sys.exit(1)
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
        _fail(" ".join(usage().split()), 2)
    sys.exit(code or 0)


def _disk(error: OSError) -> str:
    """Return a sentence for a file that cannot be used, or for an output that takes no more."""
    if error.filename is None:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # or Python tries once more as it ends, and complains at length
    return f"{error.filename or 'standard output'}: {error.strerror or error}"


def _fail(message: str, code: int) -> NoReturn:
    print(f"swaleak: {message}", file=sys.stderr)
    sys.exit(code)
