"""The command line of a script: help with examples, and errors that name what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any

from deqfast._checks import did_you_mean


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

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]  # argparse has overloads
        """Return the arguments; a wrong one ends the program with status 2 and a line that names it."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            hints = dict.fromkeys(did_you_mean(word, self._option_string_actions) for word in words)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        return given


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return the `type` of an argument with these choices."""

    def chosen(word: str) -> str:
        if word not in choices:
            allowed = f"invalid choice: {word!r} (choose from {', '.join(choices)})"
            raise argparse.ArgumentTypeError(f"{allowed}{did_you_mean(word, choices)}")
        return word

    return chosen
