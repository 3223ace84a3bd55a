"""The cells of the paper: which data set and imbalance stand behind each of its tables and figures."""

from __future__ import annotations

from dataclasses import dataclass

from .config import StudyError

RATIOS = (10, 50, 100)
DATA_SETS = {"cifar": ("cifar10", "cifar100")}
"""What --dataset may name beside a single data set."""


@dataclass(frozen=True)
class Cell:
    """One data set with one imbalance; `majority` (tenths of the classes) and `ratio` are None for balanced classes."""

    dataset: str
    majority: int | None = None
    ratio: int | None = None

    @property
    def study(self) -> str:
        """The script, and the study of the settings, that runs the cell."""
        return "cifar_balanced" if self.majority is None else "cifar_lt"

    def __str__(self) -> str:
        if self.majority is None:
            return f"{self.dataset} balanced"
        return f"{self.dataset} ({self.majority},{10 - self.majority}) R={self.ratio}"


# (K_A, R); the balanced case has neither.
_BALANCED = (None, None)
TABLES: dict[str, tuple[tuple[int | None, int | None], ...]] = {
    "1": (_BALANCED,),
    **{table: tuple((majority, ratio) for ratio in RATIOS) for table, majority in (("2", 3), ("3", 5), ("4", 7))},
}
FIGURES: dict[str, tuple[tuple[int | None, int | None], ...]] = {
    "2": ((3, 10),),
    "3": (_BALANCED, (5, 100)),
    "4": ((3, 100),),
    "5": ((7, 100),),
}


def cells_of(tables: str | None, figures: str | None, dataset: str) -> list[Cell]:
    """The cells behind comma-separated numbers, or "all", of tables and figures, each once and in the paper's order.

    With dataset "cifar" the tables take both CIFAR sets and the figures, as in the paper, CIFAR-10.
    """
    named = DATA_SETS.get(dataset, (dataset,))
    found = [
        Cell(name, *split) for table in _numbers("--table", tables, TABLES) for name in named for split in TABLES[table]
    ]
    found += [Cell(named[0], *split) for figure in _numbers("--figure", figures, FIGURES) for split in FIGURES[figure]]
    return list(dict.fromkeys(found))


def _numbers(flag: str, text: str | None, known: dict[str, tuple[tuple[int | None, int | None], ...]]) -> list[str]:
    if text is None:
        return []
    numbers = list(known) if text == "all" else text.split(",")
    for number in numbers:
        if number not in known:
            raise StudyError(f"{flag} {text}: all, or some of {', '.join(known)} with commas between")
    return numbers
