"""The tiers of the suite: what runs if no tests are named, and what is left to --rest.

Per test, the fast tier runs just enough cases for each entry of each `parametrize` to occur, and with ``covering(2)``
each pair of entries. It has kernels cpp and torch. A test with a parameter `implementation` (of an op) also runs the
first case of each other one. Tests, classes, files or cases with the mark ``tier("full")`` are not in the fast tier,
unless a ``tier("fast")`` is nearer. ``not_covering`` leaves cases of slow kernels out of every tier.
"""

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from interpreter import INTERPRETED

# isort: split
import pytest

import deqfast

SMOKE = "DEQFAST_SMOKE" in os.environ  # set by benchmarks/gpu.sh, to save the compilation of Triton's kernels
OTHERS = ("triton", "cuda", "emulated")
TIERS = {
    "fast": "the default: few cases of each test, and no long ones",
    "rest": "what the fast tier leaves out",
    "full": "both; the default if files, -k, -m or --lf select the tests",
}
LEFT_OUT = pytest.StashKey[int]()


def covering(combinations: Sequence[Mapping[str, Any]], strength: int) -> set[int]:
    """Indices of combinations {parameter: value}, chosen greedily so that all groups of `strength` values occur.

    The groups are those in `combinations`: every value with strength 1, every pair of values with 2; 0 takes the first.
    Ties are broken by the new groups of one value more, then by the groups that occurred least.
    """
    values = [[(name, repr(value)) for name, value in sorted(case.items())] for case in combinations]
    groups, larger = ([{(), *itertools.combinations(case, n)} for case in values] for n in (strength, strength + 1))
    missing, unseen = set().union(*groups), set().union(*larger)
    used: Counter[tuple[tuple[str, str], ...]] = Counter()
    chosen = set()

    def gain(i: int) -> tuple[int, int, int]:
        return len(groups[i] & missing), len(larger[i] & unseen), -sum(used[group] for group in groups[i])

    while missing:
        best = max(range(len(groups)), key=gain)
        chosen.add(best)
        missing -= groups[best]
        unseen -= larger[best]
        used.update(groups[best])
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "Tiers of the tests (the last option counts)")
    for tier, text in TIERS.items():
        group.addoption(f"--{tier}", dest="tier", action="store_const", const=tier, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose the tier. Workers of xdist inherit the option; to them all tests look named."""
    option = config.option
    if option.tier is None:
        selected = option.keyword or option.markexpr or getattr(option, "lf", False)
        named = selected or config.args_source is not config.ArgsSource.TESTPATHS
        option.tier = "full" if named else "fast"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'tier(name): "full": long, and not in the fast tier; "fast": in it nevertheless')
    config.addinivalue_line(
        "markers",
        "covering(strength): in every tier, kernels that are interpreted or emulated run just enough cases for each "
        "value (strength 1) or pair of values (2) of the parameters to occur; with 0 a single case. Other kernels do "
        "this in the fast tier only, with strength 1 at least",
    )


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def kernel_of(item: pytest.Item) -> Any:
    return parameters(item).get("kernel") or parameters(item).get("implementation")


def entries(item: pytest.Item) -> dict[str, Any]:
    """Entries {names: values} of the parametrized fixtures, and of each `parametrize`, of this case."""
    fixtures, tables = dict(parameters(item)), {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        tables[" ".join(names)] = [fixtures.pop(name) for name in names]
    return tables | fixtures


def families(items: Iterable[pytest.Item], key: Callable[[pytest.Item], Any] = lambda item: None) -> list:
    """The cases of each test, apart if their keys differ."""
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0], key(item)].append(item)
    return list(groups.values())


def strength(item: pytest.Item) -> int:
    mark = item.get_closest_marker("covering")
    return mark.args[0] if mark else 0


def not_covering(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of slow kernels that the mark `covering` leaves out of every tier."""
    slow = {"emulated": True, "triton": INTERPRETED or SMOKE, "cuda": SMOKE}
    marked = [item for item in items if slow.get(kernel_of(item)) and item.get_closest_marker("covering")]
    for family in families(marked, kernel_of):
        chosen = covering([parameters(item) for item in family], strength(family[0]))
        yield from (item for i, item in enumerate(family) if i not in chosen)


def fast(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of the fast tier; the same in every process."""
    available = deqfast.backends()

    def candidate(item: pytest.Item) -> bool:
        own = [mark for mark in item.own_markers if mark.name == "tier"]  # of the function, then of the case
        tier = own[-1] if own else item.get_closest_marker("tier")
        return available.get(kernel_of(item), True) and (tier is None or tier.args == ("fast",))

    for family in families(filter(candidate, items)):
        usual = [item for item in family if kernel_of(item) not in OTHERS]
        yield from (usual[i] for i in covering([entries(item) for item in usual], max(1, strength(family[0]))))
        for name in OTHERS:
            yield from [item for item in family if parameters(item).get("implementation") == name][:1]


def long_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests in an order for two workers, which begin with a half each: both first run long ones, and end together."""
    long = [item for item in items if item.get_closest_marker("tier")]
    short = [item for item in items if not item.get_closest_marker("tier")]
    first = len(long) // 2
    rest = max(0, len(items) // 2 - first)
    return [*long[:first], *short[:rest], *long[first:], *short[rest:]]


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that the tiers do not depend on them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out, tier = set(not_covering(items)), config.option.tier
    if tier != "full":
        every = [item for item in items if item not in left_out]
        chosen = set(fast(every))
        other = {item for item in every if (item in chosen) != (tier == "fast")}
        config.stash[LEFT_OUT] = len(other)
        left_out |= other
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if tier == "rest":
        items[:] = long_first(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that starts the workers of xdist, which collects nothing itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_report_header(config: pytest.Config) -> str:
    return f"tier {config.option.tier}: {TIERS[config.option.tier]}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        tier = config.option.tier
        other = {"fast": "rest", "rest": "fast"}[tier]
        terminalreporter.write_line(f"tier {tier}: {left_out} tests left out, which --{other} runs; --full runs all")
