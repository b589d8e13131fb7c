"""The `finback` command: registers the verbs, turns errors into one line and an exit code."""

import logging
import sys
from typing import Annotated

import typer

from finback import __version__
from finback.cli import (
    bench,
    cache,
    chat,
    convert,
    inspect,
    list_models,
    output,
    replay,
    run,
    score,
    synth,
)
from finback.errors import FinbackError

app = typer.Typer(
    name="finback",
    help="Run mixture-of-experts language models larger than memory, "
    "straight from their published files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("score")(score.score)
app.command("inspect")(inspect.inspect)
app.command("list")(list_models.list_models)
app.command("synth")(synth.synth)
app.command("convert")(convert.convert)
app.command("replay")(replay.replay)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from finback.kernels.library import describe

        output.data(f"finback {__version__} (native library: {describe()})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Set what all commands share."""
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line and leave with its exit code; finback/errors.py lists the codes."""
    sys.exit(exit_code_of())


def exit_code_of() -> int:
    """Run the command line and give its exit code; no traceback reaches a user."""
    output.prepare()
    try:
        app(standalone_mode=True)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
        if (describe := getattr(leaving.__context__, "format_message", None)) is not None:
            _as_json(describe(), code)  # the option parser's, which it has said on stderr
        return code
    except FinbackError as error:
        return _refuse(str(error), error.exit_code)
    except BrokenPipeError:
        output.close_quietly()
        return 1
    except KeyboardInterrupt:
        output.talk("")
        return 130
    except MemoryError:
        return _refuse("out of memory; close other programs or choose a smaller model", 4)
    except OSError as error:
        return _refuse(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    return 0


def _refuse(message: str, code: int) -> int:
    """Say an error in one line on stderr, and as JSON on stdout where JSON was asked for."""
    line = output.printable(message).replace("\n", "\\n")
    output.talk(f"finback: {line}")
    _as_json(line, code)
    return code


def _as_json(message: str, code: int) -> None:
    """Say an error on stdout too where JSON was asked for, if anybody still reads it."""
    words = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    if "--json" not in words:
        return
    try:
        output.json_data({"error": {"message": message, "exit_code": code}})
    except OSError:
        output.close_quietly()
