"""Traces by torch.compile and torch.export: whether one runs, and calls that are kept out of it.

In a trace, code must not read values or addresses, or change modes.
"""

import itertools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces this, with strict=False; in torch 2.11 also whether torch.compile does."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


def is_tracing() -> bool:
    """Return whether ``torch.compile`` or ``torch.export`` traces this thread; ``is_compiling`` means any thread."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def outside_exports(mode: AbstractContextManager) -> AbstractContextManager:
    """Return `mode`, such as no_grad; in an export a null context, because torch 2.15 could not load one in parts."""
    return nullcontext() if is_exporting() else mode


def reason(error: BaseException) -> str:
    """Reason why a trace failed: torch's explanation, else the first line of the error's first cause."""
    if explained := re.search(r"Explanation: (.+)", str(error)):
        return explained[1]
    while (cause := getattr(error, "inner_exception", error.__cause__)) is not None:
        error = cause
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_failed_trace(error: BaseException) -> bool:
    """Return whether compilation failed, rather than the compiled code."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


Result = TypeVar("Result")

_lock, _inside, _stance = threading.Lock(), 0, ExitStack()


def constant_in_traces(f: Callable[..., Result]) -> Callable[..., Result]:
    """Return `f`, which a trace runs untraced, with its result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports dynamo, which takes seconds.
    """
    vars(f)["_dynamo_marked_constant"] = True
    return f


def uncompiled(f: Callable[..., Result]) -> Callable[..., Result]:
    """Return `f`, run without compiled code. While one thread runs it, code of other threads runs uncompiled too."""

    def plain(*arguments: Any) -> Result:
        with _force_eager():
            return f(*arguments)

    def run(*arguments: Any) -> Result:
        return untraced(plain if "torch._dynamo" in sys.modules else f, *arguments)

    return run


def untraced(f: Callable[..., Result], *arguments: Any) -> Result:
    """Return ``f(*arguments)``; dynamo does not compile it, even if it compiles the caller in parts."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import would take seconds
        return f(*arguments)
    hides = torch.compiler.is_dynamo_compiling() or _callback() is not None
    return _disabled()(f, *arguments) if hides else f(*arguments)


_made: list[Callable[..., Any]] = []


def _disabled() -> Callable[..., Any]:
    """Function that calls another one untraced. Made once: making it takes longer than a step of a small solve.

    It is kept in a list. Dynamo would warn of functools.cache, which it ignores.
    """
    if not _made:
        _made.append(torch.compiler.disable(lambda f, *arguments: f(*arguments)))
    return _made[0]


def is_given_up() -> bool:
    """Return, in an untraced frame, whether dynamo gave up that frame and compiles the functions that it calls."""
    return "torch._dynamo" in sys.modules and callable(_callback())


def _callback() -> Any:
    """Dynamo's callback for new frames of this thread; None: nothing is compiled; False: only existing code runs."""
    _disabled()  # a trace that made it would be made again at the next call, which finds it
    return torch._C._dynamo.eval_frame.get_eval_frame_callback()


@contextmanager
def _force_eager() -> Iterator[None]:
    """Context with the stance "force_eager" of the whole process: the first thread sets it, the last one ends it."""
    global _inside
    with _lock:
        if not _inside:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _stance.close()


_numbers = itertools.count()
# Dynamo's config belongs to the process before 2.14, and to each thread from then on.
_config_lock: Any = nullcontext() if TorchVersion(torch.__version__) >= "2.14" else threading.RLock()


class Codes:
    """Code that torch.compile makes of a function, as one graph for each key and each set of guards.

    options: returns options of inductor, when code is made.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Callable[[], dict[str, Any]] | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self._function, self._options, self._backend = function, options, backend
        self._codes: dict[Any, Callable[..., Any]] = {}
        self._served: set[Any] = set()  # keys whose code has run
        self._making: dict[Any, Any] = {}  # a lock for each key

    def call(self, key: Any, *arguments: Any) -> Any:
        """Call the code of `key`, which is compiled if none fits."""
        if key in self._served:
            with _config_lock:
                return self._called(key, arguments)
        with self._making.setdefault(key, threading.RLock()), _config_lock:
            # Threads that begin at the same time would each compile.
            if key not in self._codes:
                self._renew(key)
            result = self._called(key, arguments)
            self._served.add(key)
            return result

    def _called(self, key: Any, arguments: tuple[Any, ...]) -> Any:
        config: Any = torch._dynamo.config
        before = config.specialize_float, config.skip_nnmodule_hook_guards
        # A loop's body takes no number that varies; hooks may change. ``config.patch`` would take a tenth of a small
        # solve's time.
        config.specialize_float, config.skip_nnmodule_hook_guards = True, False
        try:
            return self._codes[key](*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # a number has had more values than torch keeps code for
            self._renew(key)
            return self._codes[key](*arguments)
        finally:
            config.specialize_float, config.skip_nnmodule_hook_guards = before

    def _renew(self, key: Any) -> None:
        # torch counts recompilations, and learns which sizes change, by code and name.
        code = self._function.__code__.replace(co_name=f"{self._function.__name__}_{next(_numbers)}")
        own = types.FunctionType(code, self._function.__globals__, argdefs=self._function.__defaults__)
        options = self._options() if self._options else None
        self._codes[key] = torch.compile(own, fullgraph=True, backend=self._backend, options=options)

    def __reduce__(self) -> Any:
        """A copy has none of the code, which lives in one process."""
        return Codes, (self._function, self._options, self._backend)
