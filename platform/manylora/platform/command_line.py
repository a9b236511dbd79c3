"""Command-line options made from the settings, so that each is written down once."""

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from manylora.platform.settings import Settings, SettingsError, all_options, load_settings

_CONFIG = typer.Option(help="TOML file of settings", metavar="FILE")


Command = Callable[Concatenate[Settings, ...], None]


def with_settings(*names: str) -> Callable[[Command], Callable[..., None]]:
    """A decorator: the command takes settings as options, and gets them merged.

    Its other parameters stay what they are.

    Args:
        names: the settings it takes; all of them when none is named. Secrets are never options:
            everybody on the machine can read a command line.
    """

    def decorate(command: Command) -> Callable[..., None]:
        _settings, *own = inspect.signature(command).parameters.values()

        def run(config: Path | None, **given: Any) -> None:
            passed = {parameter.name: given.pop(parameter.name) for parameter in own}
            chosen = {name: value for name, value in given.items() if value is not None}
            command(load_settings(chosen, config), **passed)

        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        parameters.append(_parameter("config", Annotated[Path | None, _CONFIG]))
        for name, option in all_options().items():
            if name in (names or all_options()) and not _is_secret(option):
                parameters.append(_parameter(name, _annotation(name, option)))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def spread_lora_modules(arguments: Sequence[str]) -> list[str]:
    """vLLM's `--lora-modules a=x b=y` as click reads it: the option once for each value."""
    option = "--lora-modules"
    spread: list[str] = []
    for argument in arguments:
        follows = len(spread) >= 2 and spread[-2] == option
        if follows and "=" in argument and not argument.startswith("-"):
            spread.append(option)
        spread.append(argument)
    return spread


def named_folders(modules: Sequence[str]) -> dict[str, Path]:
    """`name=path` of each `--lora-modules`.

    Raises:
        SettingsError: one is not of that form, or a name is given twice.
    """
    folders: dict[str, Path] = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            raise SettingsError(f"lora_modules: {module} is not of the form name=path")
        if name in folders:
            raise SettingsError(f"lora_modules: {name} is given twice")
        folders[name] = Path(path)
    return folders


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    # The default is "not given", so that environment and file have their say.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _annotation(name: str, option: FieldInfo) -> Any:
    """Flags are flags; all else is text here, and `load_settings` reads it."""
    text, default = option.description or "", option.default
    flag = "--" + name.replace("_", "-")
    if option.annotation is bool:
        text += f" (default: {'yes' if default else 'no'})"
        return Annotated[bool | None, typer.Option(flag + "/--no-" + flag[2:], help=text)]
    if default is not None:
        text += f" (default: {default})"
    return Annotated[
        str | None, typer.Option(flag, help=text, metavar=_kind(option), show_default=False)
    ]


def _kind(option: FieldInfo) -> str:
    if typing.get_origin(option.annotation) is Literal:
        return "|".join(_types(option.annotation))
    kinds = [kind for kind in _types(option.annotation) if kind is not types.NoneType]
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "TEXT")


def _is_secret(option: FieldInfo) -> bool:
    return SecretStr in _types(option.annotation)


def _types(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or (annotation,)
