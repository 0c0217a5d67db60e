"""The command line: its commands, and how an error becomes one message and an exit code. Nothing
heavy is imported before a command needs it: `fedlens --help` answers at once.

What a user can get wrong costs one message on stderr and exit code 2; Ctrl-C saves and exits with
130. Set FEDLENS_DEBUG=1 to see where an error came from.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.core import TyperArgument, TyperGroup
from typer.utils import get_params_from_function

from fedlens import __version__
from fedlens.cli import (
    audit,
    board,
    compare,
    export,
    ledger,
    new,
    partition,
    privacy,
    results,
    run,
    sites,
    sweep,
    trust,
    upkeep,
)
from fedlens.cli import list as list_
from fedlens.cli.options import Stopped
from fedlens.sites.logs import log_line

USER_ERROR, INTERRUPTED = 2, 130
# the base of typer's errors: of the click that it stands on, or that it carries with it
CommandLineError: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

app = typer.Typer(
    name="fedlens",
    help=(
        "Federated vision: train a model or restore a scene together, and no image leaves its"
        " owner."
    ),
    epilog=(
        "[bold]Start here[/]\n\n"
        "fedlens run demo                                  a job in half a minute\n\n"
        "fedlens list recipes                              what else there is\n\n"
        "fedlens compare demo --algorithms fedavg,fedprox  two methods side by side"
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    run,
    compare,
    sweep,
    list_,
    partition,
    privacy,
    results,
    export,
    audit,
    sites,
    ledger,
    trust,
    upkeep,
    board,
    new,
)
for commands in COMMANDS:
    app.add_typer(commands.app)


def say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedlens {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=say_version, is_eager=True, help="Say which version."),
    ] = False,
) -> None:
    """What stands before a command."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    others = warnings.formatwarning
    warnings.formatwarning = lambda text, kind, *a, **k: (
        f"fedlens: {text}\n" if kind is UserWarning else others(text, kind, *a, **k)
    )
    sys.exit(invoke(argv))


def invoke(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    try:
        code = command_group()(
            args=list(argv) if argv is not None else None,
            standalone_mode=False,
            prog_name="fedlens",
        )
        return int(code or 0)
    except CommandLineError as e:
        text = str(getattr(e, "format_message", e.__str__)())
        if type(e).__name__ == "NoArgsIsHelpError":
            typer.echo(text)
            return 0
        return fail(text, e)
    except (typer.Abort, KeyboardInterrupt, Stopped) as e:
        said = str(e) or str(e.__cause__ or "")
        said = said or "stopped before the first round; there was nothing to save."
        return fail(said, code=INTERRUPTED)
    except BrokenPipeError:  # `fedlens list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        return fail(describe_os_error(e), e)
    except ValueError as e:
        return fail(str(e), e)
    except ImportError as e:
        from fedlens.core.extras import explain_missing

        if (why := explain_missing(e)) is None:
            raise
        return fail(why, e)
    except Exception as e:
        from fedlens.runs.job import Interrupted

        if not isinstance(e, Interrupted):
            raise
        return fail(f"{e}; what was done is saved. Go on with: {e.again}", code=INTERRUPTED)


def fail(message: str, error: BaseException | None = None, code: int = USER_ERROR) -> int:
    """One line on stderr; the exit code."""
    if error is not None and os.environ.get("FEDLENS_DEBUG"):
        raise error
    text = " ".join(message.split())
    complete = code == INTERRUPTED or text.endswith((".", "?", "!"))
    log_line(text + ("" if complete else "."), "fedlens: ")
    return code


def describe_os_error(e: OSError) -> str:
    name = f" ({e.filename})" if e.filename else ""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{name}; what was written before is whole: make room and add --resume"
        )
    return f"{e.strerror or e}{name}" if e.errno else str(e)


def command_group() -> TyperGroup:
    """All commands. Their arguments get the help back that click takes away: from 8.5 on it has one
    of its own for arguments, and writes None over what typer has put there before."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    commands = [*group.commands.values()]
    for command in commands:
        if isinstance(command, TyperGroup):
            commands += command.commands.values()
        if not command.callback:
            continue
        declared = get_params_from_function(inspect.unwrap(command.callback))
        for argument in command.params:
            if isinstance(argument, TyperArgument):
                argument.help = declared[str(argument.name)].default.help
    return group


if __name__ == "__main__":
    main()
