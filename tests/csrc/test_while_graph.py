"""The graph that csrc/cuda/while_graph.cu builds, executed by a runtime of graphs on the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import emulate
import pytest

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")


GRAPHS = Path(__file__).with_name("graphs")


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    library = tmp_path_factory.mktemp("graphs") / "replays.so"
    flags = ["-std=c++17", "-w", "-shared", "-fPIC", f"-I{GRAPHS}", f"-I{emulate.ROOT / 'csrc/cuda'}"]
    subprocess.run([emulate.COMPILER, *flags, str(GRAPHS / "replays.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).replayed
    function.restype = ctypes.c_char_p
    return lambda samples, most, fails=0, solves=1: function(samples, most, fails, solves).decode()


@pytest.mark.parametrize(("samples", "most", "passes"), [(3, 9, 3), (3, 3, 3), (3, 2, 2), (0, 9, 0), (1, 1, 1)])
def test_the_passes_end_on_the_device(samples, most, passes, replayed):
    assert replayed(samples, most) == f"b{'.' * passes}e{passes} " * 3 + "0"


def test_several_loops_or_none_or_no_end(replayed):
    assert replayed(3, 9, solves=2) == "b...b...e3 " * 3 + "0"
    assert replayed(3, 9, solves=0) == "b" * 3 + "0"
    assert replayed(3, 99) == "b..." * 3 + "0"


def test_every_error_names_its_call_and_leaves_nothing(replayed):
    errors = [replayed(3, 9, fails) for fails in range(1, 9)]
    assert [text.partition(":")[0] for text in errors] == [
        *("cudaGraphCreate", "cudaGraphAddChildGraphNode", "cudaGraphConditionalHandleCreate", "cudaGraphAddNode"),
        *("cudaGraphAddNode", "cudaGraphAddChildGraphNode", "cudaGraphAddNode", "cudaGraphAddChildGraphNode"),
    ]
    assert all(text.endswith(": an error0") for text in errors)
