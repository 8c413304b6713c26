"""Command lines: `draco VERB key=value …`. A dataclass declares the options of a command; one parser reads them.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: tuple[Path, ...] = words("run folders")
        window: Count = option(10, "training steps a window")

    COMMAND = Command("draco report", "tables and figures", Options, examples=("draco report runs/NAME",))
    COMMAND.parse(["runs/NAME", "window=5"])  # Options(run=(Path("runs/NAME"),), window=5)

Importing this module is fast.
"""

from __future__ import annotations

import difflib
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from draco.core.errors import ConfigError, DracoError
from draco.core.llm.money import Prices

__all__ = ["Command", "did_you_mean", "end", "exit_status", "needed", "option", "passed_on", "prices_of", "words"]

O = TypeVar("O")  # noqa: E741 - the dataclass of a command's options


def option(default: Any, about: str, *, shown: str = "", read: Callable[[str, str], Any] | None = None) -> Any:
    """An option.

    Args:
        default: value if the option is not given.
        about: description for --help.
        shown: description of the default for --help; empty: the value itself.
        read: `(text, name) → value`; None: by the annotation of the field.
    """
    return field(default=default, metadata={"about": about, "shown": shown, "read": read})


def needed(about: str) -> Any:
    """A required option."""
    return field(metadata={"about": about, "shown": "must be given"})


def words(about: str, *, optional: bool = False) -> Any:
    """The field for arguments that are not key=value: a `tuple[Path, ...]`, or one `Path`.

    They can also be given as NAME=VALUE. With `optional` the field is None if nothing is given.
    """
    return field(default=None, metadata={"about": about, "words": True, "optional": optional})


def passed_on(about: str, *prefixes: str) -> Any:
    """The field for `key=value` of the training configuration, unparsed: a `tuple[str, ...]`.

    Args:
        about: description for --help.
        prefixes: sections such as `judge.`; none: every key that is not an option of the command.
    """
    return field(default=(), metadata={"about": about, "prefixes": prefixes})


@dataclass(frozen=True)
class Command(Generic[O]):
    """Name, options and help of a command.

    Args:
        name: as it is typed: `draco report`.
        summary: one line, for the list of commands.
        options: a keyword-only dataclass whose fields are made by `option`, `needed`, `words` and `passed_on`.
        description: more text for --help.
        examples: complete command lines.
    """

    name: str
    summary: str
    options: type[O]
    description: str = ""
    examples: tuple[str, ...] = ()

    def parse(self, arguments: Sequence[str]) -> O:
        """The options that a command line gives.

        Raises:
            ConfigError: an unknown or missing option, or a value that does not fit.
        """
        own, taken, rest = self._own(), self._taking("words"), self._taking("prefixes")
        given: dict[str, Any] = {}
        loose: list[str] = []
        passed: list[str] = []
        for argument in arguments:
            name, has_value, text = argument.partition("=")
            if has_value and name in own:
                given[name] = _read(own[name], name, text, self._types()[name])
            elif has_value and taken is not None and name == taken.name:
                loose.append(text)
            elif rest is not None and _goes_on(argument, rest.metadata["prefixes"]):
                passed.append(argument)
            elif has_value and "/" not in name and name.replace(".", "").replace("_", "").isalnum():
                raise ConfigError(f"unknown option {name}; {self._existing(name)}")
            elif taken is None or argument.startswith("-"):
                raise ConfigError(f"{argument}: expected key=value; {self._existing(argument)}")
            else:
                loose.append(argument)
        if taken is not None:
            given[taken.name] = self._loose(taken, loose)
        if rest is not None:
            given[rest.name] = tuple(passed)
        for one in fields(self.options):  # type: ignore[arg-type]
            if one.name not in given and one.default is MISSING:
                raise ConfigError(f"{one.name}=VALUE is missing: {one.metadata['about']}")
        return self.options(**given)

    def help(self) -> str:
        """What --help prints."""
        taken = self._taking("words")
        lines = [f"{self.name}{f' {taken.name.upper()}' if taken else ''} key=value …", "", _sentence(self.summary)]
        if self.description:
            lines += ["", textwrap.dedent(self.description).strip()]
        lines += ["", "Options:"]
        for one in fields(self.options):  # type: ignore[arg-type]
            name, about = _shown(one)
            first, *more = textwrap.wrap(about, 96, break_on_hyphens=False)
            lines += [f"    {name:17} {first}", *(" " * 22 + line for line in more)]
        if self.examples:
            lines += ["", "Examples:", *(f"    {e}" for e in self.examples)]
        return "\n".join(lines)

    @contextmanager
    def beside_the_configuration(self) -> Iterator[None]:
        """Errors about unknown keys of a configuration composed within also list the options of this command.

        Raises:
            ConfigError: of the composition.
        """
        try:
            yield
        except ConfigError as error:
            text = str(error)
            if ": no such option; " not in text:
                raise
            key = text.split("'")[1] if "'" in text else text.split("=")[0]
            raise ConfigError(f"{text}; {self._existing(key)}") from None

    def names(self) -> dict[str, Any]:
        """Option → type, for completion."""
        return {name: self._types()[name] for name in self._own()}

    def prefixes(self) -> tuple[str, ...] | None:
        """Sections of the training configuration that are passed on: () = all, None = none."""
        rest = self._taking("prefixes")
        return None if rest is None else tuple(rest.metadata["prefixes"])

    def _own(self) -> dict[str, Field[Any]]:
        every: tuple[Field[Any], ...] = fields(self.options)  # type: ignore[arg-type]
        return {f.name: f for f in every if not {"words", "prefixes"} & f.metadata.keys()}

    def _taking(self, kind: str) -> Field[Any] | None:
        every: tuple[Field[Any], ...] = fields(self.options)  # type: ignore[arg-type]
        return next((f for f in every if kind in f.metadata), None)

    def _types(self) -> dict[str, Any]:
        return get_type_hints(self.options, include_extras=True)

    def _existing(self, asked: str) -> str:
        own = sorted(self._own())
        meant = did_you_mean(asked.lstrip("-").partition("=")[0].replace("-", "_"), own)
        return f"{meant}{'Options' if meant else 'options'} of {self.name}: {', '.join(own)}; --help explains them"

    def _loose(self, taken: Field[Any], found: list[str]) -> Any:
        if not found and taken.metadata["optional"]:
            return None
        if not found:
            raise ConfigError(f"no {taken.name} is given: {self.examples[0]}")
        if get_origin(self._types()[taken.name]) is tuple:
            return tuple(Path(w) for w in found)
        if len(found) > 1:
            raise ConfigError(f"{found[1]}: {self.name} takes one {taken.name}; {self._existing(found[1])}")
        return Path(found[0])


def did_you_mean(asked: str, names: Iterable[str], prefix: str = "") -> str:
    """A question that ends with a space; empty if no name is similar. `prefix` is shown before the names."""
    near = difflib.get_close_matches(asked, list(names), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(prefix + n for n in near)}? " if near else ""


def _goes_on(argument: str, prefixes: Sequence[str]) -> bool:
    """Whether an argument belongs to the configuration: KEY=VALUE, or ~KEY, which removes an entry."""
    name, has_value, _ = argument.partition("=")
    name = name.lstrip("+~")
    if argument.startswith("-") or not (has_value or argument.startswith("~")) or "/" in name.split("@")[0]:
        return False
    return not prefixes or any(name == p or (p.endswith(".") and name.startswith(p)) for p in prefixes)


def _read(one: Field[Any], name: str, text: str, annotation: Any) -> Any:
    """The value of a text.

    Raises:
        ConfigError: it does not fit the annotation.
    """
    if one.metadata.get("read"):
        return one.metadata["read"](text, name)
    from draco.config.options import check_option  # imports pydantic, which --help need not wait for

    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if type(None) in parts and text == "null":
        return None
    if Path in parts:
        return Path(text)
    if any(get_origin(p) is tuple for p in parts):
        return tuple(text.split(","))
    value: Any = text if str in parts else _scalar(text)
    check_option(name, value, annotation)
    return value


def _scalar(text: str) -> bool | int | float | str:
    """A text as a boolean, an integer or a number, if it is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text) if text.isascii() and "_" not in text else text
        except ValueError:
            continue
    return text


def _shown(one: Field[Any]) -> tuple[str, str]:
    about = one.metadata["about"]
    if "words" in one.metadata:
        return one.name.upper(), about
    if "prefixes" in one.metadata:
        prefixes = one.metadata["prefixes"]
        return ", ".join(f"{p}KEY" if p.endswith(".") else p for p in prefixes) or "KEY", about
    default = one.metadata.get("shown")
    if not default:
        value = one.default
        default = "not set" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
        default = ",".join(value) if isinstance(value, tuple) else default
        default = f"{value:g}" if isinstance(value, float) else default
    return one.name, f"{about} ({default if default == 'must be given' else f'default: {default}'})"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"


def end(main: Callable[[list[str]], int | None], command: Command[Any] | None = None) -> None:
    """Call the `main` of a script with the command line, and exit with the status that it returns.

    Args:
        main: takes the arguments; None = 0.
        command: for --help.
    """
    arguments = sys.argv[1:]
    if command is not None and {"-h", "--help"} & set(arguments):
        print(command.help())
        sys.exit(0)
    sys.exit(exit_status(lambda: main(arguments)))


def exit_status(call: Callable[[], int | None]) -> int:
    """Call, and return the exit status. A `DracoError` becomes one line on stderr; other exceptions are raised.

    Returns:
        What the call returned (None = 0); 2: a configuration or an input cannot work; 3: a judge, a server or an
        environment failed, or a limit stopped the run; 130: Ctrl-C.
    """
    try:
        return call() or 0
    except DracoError as error:
        say(str(error))
        return 2 if isinstance(error, ConfigError) else 3
    except KeyboardInterrupt:
        say("interrupted", "")
        return 130


def say(message: str, title: str = "error: ") -> None:
    """Print one line on stderr."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((title, "bold red"), message)
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def prices_of(text: object, name: str = "prices") -> Prices | None:
    """Prices of input tokens, input tokens from a cache, and output tokens; None if nothing is given.

    Args:
        text: two or three numbers with commas; with two, cached tokens cost as much as other input.
        name: of the option.

    Raises:
        ConfigError: the text is something else.
    """
    if text is None:
        return None
    try:
        values = [float(v) for v in str(text).split(",")]
        read, *again, written = values
        if len(again) > 1 or not all(0 <= v < math.inf for v in values):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{name}={text}: expected READ,WRITTEN or READ,READ_AGAIN,WRITTEN in USD per million, each 0 or more"
        ) from None
    return Prices(read, written, *again)
