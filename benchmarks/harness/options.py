"""Cases of a layer's adjoints: time, memory and error of each gradient, from the same solve."""

from __future__ import annotations

from typing import Any

import deqfast

from .counters import memory
from .entry import Case, Contender, check
from .peers import block_layer
from .training import Layer, Setup, exact_gradient, flat

ADJOINTS = {
    "jfb": deqfast.JFB(),
    "phantom": deqfast.Phantom(relaxation=1.0),
    "neumann": deqfast.Neumann(),
    "shine": deqfast.SHINE(),
    "implicit": deqfast.Implicit(),
    "gmres": deqfast.Implicit(deqfast.Anderson(1e-6, 100, history_size=32)),  # in exact arithmetic
    "unrolled": deqfast.Unrolled(40),
    "checkpoint": deqfast.Unrolled(40, checkpoint=True),
    "reversible": deqfast.Reversible(12),
}


def gradient(cell: str, shape: tuple[int, ...], solver: Any) -> Case:
    """Gradients of a layer, by their error relative to the exact implicit one."""
    layer = Layer(cell, shape, "implicit", solver)

    def contender(provider: str, device: str) -> Contender:
        setup = Setup(layer, "auto", device)
        block = deqfast.DEQBlock(setup.cell, solver, ADJOINTS[provider])
        function = block_layer(block)

        def step() -> Any:
            return setup.step(function)

        reached, exact = flat(step()[0]), exact_gradient(layer)[0]
        cosine = float(reached @ exact / reached.norm() / exact.norm())
        check("distance of the gradient's cosine from 1", 1 - cosine, 0.5)
        facts = {"error": float((reached - exact).norm() / exact.norm()), "cosine": cosine}
        facts |= {"peak_bytes": memory(step, device)[1], "evaluations": setup.calls(function)}
        if block.backward_solution is not None:
            facts["backward_evaluations"] = block.backward_solution.evaluations
        return Contender(step, facts)

    name = f"gradient-{layer.name.replace('-implicit', '')}"
    return Case("options", name, tuple(ADJOINTS), ("implicit", "jfb"), contender)
