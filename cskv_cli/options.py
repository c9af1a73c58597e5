"""Turning a command function into a verb: flags from configs, the flags all verbs share, and errors into exit codes."""

import errno
import functools
import inspect
import logging
import os
import re
import signal
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cskv_cli.config import StageConfig
from cskv_cli.console import Console
from cskv_cli.errors import CskvError

RunOption = Annotated[Path, typer.Option("--run", envvar="CSKV_RUN", help="Run directory.", show_default=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", envvar="CSKV_DEBUG", help="Show the traceback of a failure.")]
MODEL_HELP = "Hub id, folder or .gguf file; by default the model that the run directory remembers."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub model.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the code that MODEL brings, and take it if transformers has the same model."
    ),
]
DEFAULT_RUN = Path("cskv-run")
DEFAULT_CHECKPOINT = str(Path(os.environ.get("CSKV_RUN", DEFAULT_RUN)) / "export")
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder or Hub id of an export.")]


Settings = dict[str, dict[str, Any]]  # stage -> the settings given for it; those not given are absent


def verb(
    *, without: Collection[str] = (), **configs: type[StageConfig]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a Typer command of `fn(..., settings, console)`, with `--json`, `--debug` and a flag per config field.

    Args:
        without: fields that get no flag.
        configs: by stage; a field that several stages have is one flag and sets all of them.
    """
    fields = {name: field for config in configs.values() for name, field in config.model_fields.items()}
    fields = {name: field for name, field in fields.items() if name not in without}

    def wrap(fn: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(fn).parameters.values() if p.name not in ("settings", "console")]
        flags = [_flag(name, field) for name, field in fields.items()]
        shared = [_parameter("json", JsonOption, False), _parameter("debug", DebugOption, False)]

        @functools.wraps(fn)
        def command(*, json: bool, debug: bool, **kwargs: Any) -> None:
            flagged = {name: kwargs.pop(name) for name in fields}
            given = {name: value for name, value in flagged.items() if value not in (None, [])}
            if configs:
                kwargs["settings"] = {
                    stage: {name: value for name, value in given.items() if name in config.model_fields}
                    for stage, config in configs.items()
                }
            _guarded(functools.partial(fn, **kwargs), Console(json), debug)

        command.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in own + flags + shared])
        command.__annotations__ = {p.name: p.annotation for p in own + flags + shared}
        return command

    return wrap


def _flag(name: str, field: Any) -> inspect.Parameter:
    kind, origin = field.annotation, typing.get_origin(field.annotation)
    values = field.default if origin is tuple else () if field.default in (None, False) else (field.default,)
    default = ", ".join(map(str, values))
    extra = field.json_schema_extra or {}
    metavar, long = extra.get("metavar"), extra.get("flag", name.replace("_", "-"))
    option = typer.Option(
        f"--{long}/--no-{long}" if kind is bool else f"--{long}",
        help=field.description,
        show_default=default or False,
        metavar=metavar,
    )
    if origin is tuple:
        return _parameter(name, Annotated[list[str] | None, option], None)
    if origin is types.UnionType:
        kind = typing.get_args(kind)[0]
    if origin is typing.Literal and isinstance(field.default, int):
        kind = int
    return _parameter(name, Annotated[kind | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _guarded(work: Callable[..., None], console: Console, debug: bool) -> None:
    """Run a verb; exit 1 with message and hint on failure, 130 and 143 when interrupted or told to stop."""
    signal.signal(signal.SIGTERM, _stop)
    _hush_libraries(console)
    try:
        work(console=console)
    except (typer.Exit, typer.BadParameter, SystemExit):
        raise
    except KeyboardInterrupt:
        _say(console, "interrupted", "what is finished is kept: run the same command again to go on")
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except ValidationError as error:
        console.result({"error": validation_message(error), "hint": "see --help"})
        raise typer.BadParameter(validation_message(error)) from None
    except CskvError as error:
        _fail(console, error.message, error.hint, debug)
    except Exception as error:
        if full := full_disk(error):
            _fail(console, full, "free some space, then run the same command again: what is finished is kept", debug)
        _fail(console, f"{type(error).__name__}: {error}", "run it again with --debug for the whole story", debug)


def validation_message(error: ValidationError) -> str:
    """What pydantic found, in one line."""
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg'].removeprefix('Value error, ')}"
        for e in error.errors()
    )


def full_disk(error: BaseException | None) -> str | None:
    """What to say if a full disk is behind a failure; libraries wrap it, or say it in words alone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full: {error.filename}" if error.filename else "the disk is full"
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return "the disk is full"
        error = error.__cause__ or error.__context__
    return None


def _fail(console: Console, message: str, hint: str, debug: bool) -> None:
    if debug:
        print(_redacted(traceback.format_exc()), file=sys.stderr)
    _say(console, message, hint)
    raise SystemExit(1) from None


def _redacted(text: str) -> str:
    """Without anything that looks like a Hub token: libraries quote headers in their complaints."""
    return re.sub(r"\bhf_\w+", "hf_***", text)


def _say(console: Console, message: str, hint: str) -> None:
    message = _redacted(message)
    with suppress(OSError):  # stdout may be what failed
        console.result({"error": message, "hint": hint})
    console.fail(message, hint)


def _hush_libraries(console: Console) -> None:
    """Libraries read these when they are imported, which is after this."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not console.chatty:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
