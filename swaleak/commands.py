"""How the command line is read, where Typer leaves something to be wished for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from swaleak.errors import Interrupted, UsageError


class Command(TyperCommand):
    """A command whose options lose nothing, and whose help says what there is to type."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises ``UsageError`` for an option that is given twice.

        Typer keeps the last one and says nothing of the first, which somebody meant.
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
    """Commands that Ctrl-C stops like any other error; what Typer does differs by its release."""

    def invoke(self, context: Any) -> Any:
        """Run a command. Raises ``Interrupted``."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise Interrupted from None

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
            param.display_type_rich = _no_type
        if param.default is None:
            param.show_default = False
    return params


def _no_type(ctx: Any) -> None:
    """Stand in for Typer's method of an argument."""
