"""Published models from clones of their repositories, with the layer of torchdeq or of ``deqfast.compat``.

Nothing of the models is copied here. A row imports the model's file from its clone and builds it twice from one seed.
Only the names that the file imports from torchdeq differ. Models are untrained, and data random.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import recording
import torch
from correctness import relative_error
from torch import Tensor, nn

from deqfast import compat
from deqfast.ops import choose_kernel

from .entry import Skipped
from .record import Row
from .suite import columns_of
from .timing import in_turns

SECTION = "models"
OURS, PEER, GRAPH = "get_deq", "torchdeq", "get_deq-graph"  # the last: with captured solves, on a GPU
MEDIAN = "median of those with a solve"
SEED, ROUNDS, SECONDS = 0, 25, 6.0
COMMITS = {
    "locuslab/torchdeq": "4f6bd5fa66dd991cad74fcc847c88061764cf8db",
    "locuslab/get": "53377d3047b8ab677ef4e84252b15b5919fe70dd",
    "AntonyJia159/deq-sets": "ffa711d0c5828455cd86c47da8c953c8cf405133",
}
# The models' files import these, and only their training scripts use them.
UNUSED = ("configargparse", "plyfile", "skimage", "skimage.measure", "termcolor", "torch_sparse", "turtle", "wandb")
NEEDED = ("einops", "timm", "yaml")  # the packages of the extra "models"
Module = Any  # an imported file of a clone


@dataclass
class Built:
    """A model with its data. call: apply it, in training or evaluation mode. loss: of what `call` returns in training.

    leaves: what the gradient is taken of; all parameters by default.
    """

    model: nn.Module
    call: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    leaves: list[Tensor] | None = None

    def train(self) -> Tensor:
        """Loss of a forward and a backward pass."""
        torch.manual_seed(SEED)
        for leaf in self.parameters():
            leaf.grad = None
        loss = self.loss(self.call())
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def predict(self) -> None:
        torch.manual_seed(SEED)
        self.call()

    def parameters(self) -> list[Tensor]:
        return [*self.model.parameters()] if self.leaves is None else self.leaves

    def gradient(self) -> Tensor:
        return torch.cat([leaf.grad.flatten() for leaf in self.parameters() if leaf.grad is not None])


@dataclass(frozen=True)
class Model:
    """Row of the section. solver: as readers see it. folder: of the clone, where `file` is imported. flags: of the
    published command. build: (file, options of these flags) -> the model. whole: at the largest size."""

    name: str
    solver: str
    repository: str
    file: str
    build: Callable[[Module, argparse.Namespace], Built]
    folder: str = ""
    flags: str = ""
    dtype: torch.dtype = torch.float64
    whole: bool = False

    @property
    def solves(self) -> bool:
        """Whether it solves at all, and does not only unroll."""
        return "f_max_iter=0" not in self.solver


def clone_of(repository: str, root: Path | None) -> Path:
    """Folder of a clone at its commit; raises ``Skipped`` with the commands that make it."""
    folder = (root or Path("FOLDER")) / repository.replace("/", "+")
    checkout = f"git -C {folder} checkout {COMMITS[repository]}"
    if root is None or not folder.is_dir():
        option = "" if root else "; then give --models-root FOLDER or DEQFAST_MODELS=FOLDER"
        raise Skipped(
            f"no clone of {repository}: git clone https://github.com/{repository} {folder} && {checkout}{option}"
        )
    head = recording.tool("git", "-C", str(folder), "rev-parse", "HEAD")
    if head != COMMITS[repository]:
        raise Skipped(f"{folder} is at commit {head or 'unknown'}: {checkout}")
    if changed := recording.tool("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"):
        raise Skipped(f"{folder} has changes: {changed}")
    return folder


def in_place_of_torchdeq() -> dict[str, Any]:
    """What ``import torchdeq`` and imports of its submodules find: their counterparts in ``deqfast.compat``."""
    import torchdeq

    names = [name for name in sys.modules if name.startswith("torchdeq.")]
    stands = {name: importlib.import_module(name.replace("torchdeq", "deqfast.compat", 1)) for name in names}
    # Not deqfast.compat itself, which looks for other names in torchdeq: it would find itself.
    stands["torchdeq"] = ModuleType("torchdeq")
    own = {name: getattr(compat, name) for name in compat.__all__}
    own |= {name.partition(".")[2]: stands[name] for name in names if name.count(".") == 1}
    vars(stands["torchdeq"]).update(vars(torchdeq) | own)
    return stands


def imported(folder: Path, file: str, provider: str) -> Module:
    """Module `file` of `folder`, whose layer is torchdeq's or ours. ``sys.modules`` is left as it was."""
    import torchdeq  # noqa: F401  # complete before a stand-in may take its name

    stands: dict[str, Any] = {name: MagicMock() for name in UNUSED}
    stands |= {} if provider == PEER else in_place_of_torchdeq()
    own = {path.stem for path in folder.iterdir()}
    for part in (part for part in folder.iterdir() if part.is_dir() and not (part / "__init__.py").is_file()):
        stands[part.name] = ModuleType(part.name)  # else a package of that name elsewhere would be found first
        stands[part.name].__path__ = [str(part)]

    def hidden() -> list[str]:
        return [name for name in sys.modules if name in stands or name.partition(".")[0] in own]

    saved = {name: sys.modules.pop(name) for name in hidden()}
    try:
        sys.modules.update(stands)
        with patch.object(sys, "path", [str(folder), *sys.path]), patch.object(sys, "dont_write_bytecode", True):
            return importlib.import_module(file)
    finally:
        for name in hidden():
            del sys.modules[name]
        sys.modules.update(saved)


@contextmanager
def on_device(device: str, dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of this dtype. Some models choose CUDA by themselves, even without a GPU."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(patch.object(torch.cuda, "is_available", lambda: False))
            stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
            stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or "0.0"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        yield


def options_of(flags: str) -> argparse.Namespace:
    """torchdeq's options as the published scripts parse them."""
    parser = argparse.ArgumentParser()
    compat.add_deq_args(parser)
    return parser.parse_args(flags.split())


def built(model: Model, folder: Path, provider: str, device: str = "cpu") -> Built:
    """The model with a provider's layer and its data, on a device; raises ``Skipped`` if a package is missing."""
    captured = patch.object(compat, "get_deq", partial(compat.get_deq, cuda_graph=True))
    with captured if provider == GRAPH else nullcontext(), torch.device(device):  # which would cost time in each call
        try:
            file = imported(folder, model.file, provider)
        except ModuleNotFoundError as missing:
            if missing.name not in NEEDED:
                raise
            raise Skipped(f"{missing.name} is not installed: pip install -e '.[models]'") from None
        torch.manual_seed(SEED)
        return model.build(file, options_of(model.flags))


def watched_step(version: Built) -> Row:
    """Loss, gradient, evaluations of func by the layers and the relative residual of their states, of a training step.

    The residual is of a whole state, and the largest of several solves.
    """
    import torchdeq

    evaluations, residuals, funcs = [0], [], []

    def before(layer: nn.Module, given: Any, options: Any) -> Any:
        func, *others = given
        funcs.append(func)

        def counted(*z: Tensor) -> Any:
            evaluations[0] += 1
            return func(*z)

        return (counted, *others), options

    def looked(layer: nn.Module, given: Any, options: Any, output: Any) -> None:
        state, func = output[0][-1], funcs.pop()
        with torch.no_grad(), torch.random.fork_rng([]):
            after = flat(func(*([state] if isinstance(state, Tensor) else state)))
            residuals.append((after - flat(state)).norm() / after.norm())

    layers = [part for part in version.model.modules() if isinstance(part, (compat.DEQ, torchdeq.core.DEQBase))]
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(looked, with_kwargs=True) for layer in layers]
    loss = version.train()
    for handle in handles:
        handle.remove()
    residual = float(torch.stack(residuals).max())
    return {"loss": loss, "gradient": version.gradient(), "evaluations": evaluations[0], "residual": residual}


def flat(state: Any) -> Tensor:
    """All entries of a state, or of a list of states."""
    return torch.cat([part.flatten() for part in ([state] if isinstance(state, Tensor) else state)])


def measure(
    model: Model, root: Path | None, device: str = "cpu", rounds: int = ROUNDS, seconds: float = SECONDS
) -> list[Row]:
    """Row of each provider: median times of its training step and its prediction, and how far ours is from torchdeq.

    loss_error, gradient_error: relative differences of the first training step, in the rows of ours. forward_ms: the
    median of a prediction. gains: torchdeq's time of a training step / this one's. A captured solve that is refused or
    fails has a row without times.
    """
    folder = clone_of(model.repository, root) / model.folder
    about: Row = {"section": SECTION, "case": model.name, "solver": model.solver, "whole": model.whole}
    about |= {"source": f"{model.repository}@{COMMITS[model.repository]}", "dtype": str(model.dtype)}
    about |= {"kernel": choose_kernel("auto", torch.device(device)).name, "device": device, "solves": model.solves}
    turns: dict[str, Any] = {"device": device, "rounds": rounds, "seconds": seconds}
    rows: list[Row] = []
    with on_device(device, model.dtype):
        versions = {provider: built(model, folder, provider, device) for provider in (PEER, OURS)}
        steps = {provider: watched_step(version) for provider, version in versions.items()}
        if device == "cuda" and model.solves:
            try:
                versions[GRAPH] = built(model, folder, GRAPH, device)
                steps[GRAPH] = watched_step(versions[GRAPH])
                del steps[GRAPH]["evaluations"]  # a replay calls nothing
            except Exception as error:  # it must not cost the others their rows
                del versions[GRAPH]
                kind = "skipped" if "cuda_graph" in str(error) else "fault"  # the former: refused with a reason
                rows.append(about | {"provider": GRAPH, kind: f"{type(error).__name__}: {error}"})
        trained = in_turns({provider: version.train for provider, version in versions.items()}, **turns)
        for version in versions.values():
            version.model.eval()
        predicted = in_turns({provider: version.predict for provider, version in versions.items()}, **turns)
    for provider, step in steps.items():
        row = about | {"provider": provider} | columns_of(trained[provider])
        row["forward_ms"] = columns_of(predicted[provider])["ms"]
        row |= {name: step[name] for name in ("evaluations", "residual") if name in step}
        if provider != PEER:
            row["gains"] = {PEER: columns_of(trained[PEER])["ms"] / row["ms"]}
            row |= {f"{name}_error": relative_error(step[name], steps[PEER][name]) for name in ("loss", "gradient")}
        rows.append(row)
    return rows


def median_row(rows: list[Row]) -> Row | None:
    """Row of the median gain over torchdeq, of the faster of our layers in each model with a solve."""
    best: dict[str, float] = {}
    for row in rows:
        if row.get("solves") and "gains" in row:
            best[row["case"]] = max(best.get(row["case"], 0.0), row["gains"][PEER])
    if not best:
        return None
    gains = {PEER: statistics.median(best.values())}
    return {"section": SECTION, "case": MEDIAN, "provider": OURS, "device": "cuda", "models": len(best), "gains": gains}
