"""Options as frozen dataclasses, checked, and the command line over them."""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from deqfast._checks import did_you_mean

KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
LIMITS = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "above": (operator.gt, "more than"),
    "below": (operator.lt, "less than"),
}

T = TypeVar("T")


class StudyError(Exception):
    """Error that the user can correct: printed as one line, without a traceback."""


class SettingsError(StudyError, ValueError):
    """Option with a value that makes no sense."""


def option(group: str, text: str, default: Any = MISSING, **checks: Any) -> Any:
    """Field that is also a command-line option.

    `checks`: choices, minimum, maximum, above and below (exclusive). A str without choices needs a `metavar` too.
    """
    return field(default=default, metadata={"group": group, "help": text, **checks})


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of dataclasses of options. Raises SettingsError for a value that makes no sense."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_field(spec, getattr(self, spec.name))


def check_field(spec: Field[Any], value: Any) -> None:
    """Raise SettingsError if the field's `option` does not allow the value."""
    checks, allowed = spec.metadata, ""
    if value is None:
        return
    if value not in checks.get("choices", (value,)):
        allowed = f"must be one of {', '.join(checks['choices'])}"
    elif isinstance(value, float) and not math.isfinite(value):
        allowed = "must be a finite number"
    for name, (met, words) in LIMITS.items():
        if not allowed and name in checks and not met(value, checks[name]):
            allowed = f"must be {words} {checks[name]}"
    if allowed:
        raise SettingsError(f"{flag_of(spec.name)} {value}: {allowed}")


def listed(name: str, words: str, known: Collection[str]) -> list[str]:
    """Words of an option with commas between, each once; SettingsError for an unknown one."""
    given = list(dict.fromkeys(words.split(",")))
    for word in given:
        if word not in known:
            reason = f"{word} is none of {', '.join(known)}{did_you_mean(word, known)}"
            raise SettingsError(f"{flag_of(name)} {words}: {reason}")
    return given


def listed_or_all(name: str, words: str, known: Collection[str]) -> list[str]:
    """Words like those of `listed`; "all" stands for each of them."""
    given = listed(name, words, ("all", *known))
    return list(known) if "all" in given else given


def flag_of(name: str) -> str:
    """Command-line option of a field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Parser that prints the description as it is written, ends its help with examples, and knows misspelt options.

    Args:
        description: what the script does.
        examples: command lines without "python experiments/".
        usage: the arguments, as the help and errors show them.
    """

    def __init__(self, description: str | None, examples: Sequence[str], usage: str = "[options]"):
        super().__init__(
            usage=f"%(prog)s {usage}",
            description=description,
            epilog="\n  python experiments/".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the arguments; a wrong one ends the program with status 2 and a line that names it."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            hints = dict.fromkeys(did_you_mean(word, self._option_string_actions) for word in words)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        return given


def choice(choices: Collection[str]) -> Callable[[str], str]:
    """Return the `type` of an argument with these choices."""

    def chosen(word: str) -> str:
        if word not in choices:
            allowed = f"invalid choice: {word!r} (choose from {', '.join(choices)})"
            raise argparse.ArgumentTypeError(f"{allowed}{did_you_mean(word, choices)}")
        return word

    return chosen


def parsed(
    kind: type[T],
    description: str | None,
    examples: Sequence[str],
    argv: Sequence[str] | None,
    usage: str = "[options]",
) -> T:
    """Options from a command line. A bad one ends the program with status 2 and a line that names it."""
    parser = Parser(description, examples, usage)
    add_options(parser, kind)
    try:
        return kind(**vars(parser.parse(argv)))
    except SettingsError as error:
        parser.error(str(error))


def add_options(
    parser: argparse.ArgumentParser,
    settings: type,
    without: Collection[str] = (),
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Add the options of a dataclass of settings to the parser, except those in `without`. An option that is not given
    is absent from the parser's result. `presets` has the values of fields without a default, by preset."""
    groups: dict[str, Any] = {}
    for spec in fields(settings):
        if not spec.metadata or spec.name in without:
            continue
        name, kind = spec.metadata["group"], KINDS[spec.type.split()[0]]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        if kind is bool:
            taken: dict[str, Any] = {"action": "store_true"}
        elif "choices" in spec.metadata:
            taken = {"choices": spec.metadata["choices"], "type": choice(spec.metadata["choices"])}
        else:
            metavar = spec.metadata["metavar"] if kind is str else kind.__name__.upper()
            taken = {"type": kind, "metavar": metavar}
        if spec.default is MISSING:
            default = ", ".join(f"{preset}: {values[spec.name]}" for preset, values in (presets or {}).items())
        else:
            default = f"default: {'off' if spec.default is None or spec.default is False else spec.default}"
        text = f"{spec.metadata['help']} ({default})".replace("%", "%%")
        group.add_argument(flag_of(spec.name), default=argparse.SUPPRESS, help=text, **taken)


def as_arguments(given: Mapping[str, Any]) -> list[str]:
    """Command line for these settings; a switch is either on or absent."""
    words = []
    for name, value in given.items():
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return words


def by_flag(options: Any) -> dict[str, Any]:
    """Values of a dataclass: of its options by flag, of other fields by name."""
    return {flag_of(spec.name) if spec.metadata else spec.name: getattr(options, spec.name) for spec in fields(options)}
