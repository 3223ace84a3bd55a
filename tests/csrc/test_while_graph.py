"""The graph that csrc/cuda/while_graph.cu builds, executed by a runtime of graphs on the host."""

from __future__ import annotations

import ctypes
import subprocess

import emulate
import pytest

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")

RUNTIME = r"""
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
struct dim3 { dim3(int = 1, int = 1, int = 1) {} };
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaGraphNodeTypeKernel = 0, cudaGraphNodeTypeConditional = 13;
constexpr int cudaGraphCondTypeWhile = 1;
constexpr unsigned cudaGraphCondAssignDefault = 1;
using cudaGraphConditionalHandle = unsigned long long;
using cudaStream_t = void*;
struct Node { std::function<void()> run; };
using cudaGraphNode_t = Node*;
struct Graph { std::vector<Node*> nodes; };  // in a chain
using cudaGraph_t = Graph*;
using cudaGraphExec_t = Graph*;
struct cudaGraphNodeParams {
  int type;
  struct { void* func; dim3 gridDim, blockDim; void** kernelParams; } kernel;
  struct { cudaGraphConditionalHandle handle; int type; unsigned size; cudaGraph_t* phGraph_out; } conditional;
};

inline int failing = 0, alive = 0;  // which call fails
inline std::vector<int> conditions;
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline int result() { return --failing == 0; }
inline void run(Graph* graph) { for (Node* node : graph->nodes) node->run(); }
using Work = std::function<void()>;
inline int append(Node** node, Graph* graph, Node** after, size_t count, Work work) {
  if (count != !graph->nodes.empty() || (count && *after != graph->nodes.back())) return 1;  // not a chain
  graph->nodes.push_back(*node = new Node{work});
  return result();
}
inline int cudaGraphCreate(Graph** graph, unsigned) { ++alive; return *graph = new Graph, result(); }
inline int cudaGraphDestroy(Graph*) { return --alive, 0; }
inline int cudaGraphInstantiate(Graph** exec, Graph* graph, unsigned) {
  if (result()) return 1;
  return ++alive, *exec = graph, 0;
}
inline int cudaGraphExecDestroy(Graph*) { return --alive, 0; }
inline int cudaGraphLaunch(Graph* exec, cudaStream_t) { return run(exec), 0; }
inline int cudaGraphConditionalHandleCreate(unsigned long long* handle, Graph*, unsigned initial, unsigned) {
  return *handle = conditions.size(), conditions.push_back(initial), result();
}
inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) { conditions[handle] = value; }
inline int cudaGraphAddChildGraphNode(Node** node, Graph* graph, Node** after, size_t count, Graph* child) {
  return append(node, graph, after, count, [copy = *child]() mutable { run(&copy); });
}
inline int cudaGraphAddNode(Node** node, Graph* graph, Node** after, void*, size_t count, cudaGraphNodeParams* p) {
  if (p->type == cudaGraphNodeTypeConditional) {
    Graph* body = new Graph;
    static Graph* out;
    out = body;
    p->conditional.phGraph_out = &out;
    const auto handle = p->conditional.handle;
    return append(node, graph, after, count, [body, handle] { while (conditions[handle]) run(body); });
  }
  using Kernel = void (*)(unsigned long long, const int32_t*, int32_t*, int32_t, bool);
  void** a = p->kernel.kernelParams;  // whose values are copied now
  const auto kernel = reinterpret_cast<Kernel>(p->kernel.func);
  const auto call = std::bind(kernel, *(unsigned long long*)a[0], *(const int32_t**)a[1], *(int32_t**)a[2],
                              *(int32_t*)a[3], *(bool*)a[4]);
  return append(node, graph, after, count, call);
}
"""
SOURCE = r"""
#include "while_graph.cu"

static std::string said;
static Graph graph_of(std::function<void()> work) { return {{new Node{work}}}; }

// `solves` of `samples`, of which one ends in each pass; the calls of three replays.
extern "C" const char* replayed(int samples, int most, int fails, int solves) {
  said.clear();
  int32_t active = -1, passes = -1;
  Graph begin = graph_of([&] { said += 'b'; active = samples; });
  Graph body = graph_of([&] { said += '.'; --active; });
  Graph end = graph_of([&] { said += "e" + std::to_string(passes) + " "; });
  try {
    failing = fails;
    std::vector<cudaGraph_t> graphs{&begin};
    for (int i = 0; i < solves; ++i) graphs.insert(graphs.end(), {&body, i + 1 < solves ? &begin : &end});
    if (most == 99) graphs.pop_back();
    deqfast::WhileGraph graph(graphs, {size_t(solves), {&active, &passes, most}});
    for (int i = 0; i < 3; ++i) graph.launch(nullptr);
  } catch (const std::exception& error) {
    said = error.what();
  }
  said += std::to_string(alive);  // graphs that were not destroyed
  return said.c_str();
}
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("while_graph")
    (folder / "cuda_runtime.h").write_text(RUNTIME)
    (folder / "code.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-w", "-shared", "-fPIC", f"-I{folder}", f"-I{emulate.ROOT / 'csrc/cuda'}"]
    subprocess.run([emulate.COMPILER, *flags, str(folder / "code.cpp"), "-o", str(folder / "code.so")], check=True)
    function = ctypes.CDLL(str(folder / "code.so")).replayed
    function.restype = ctypes.c_char_p
    return lambda samples, most, fails=0, solves=1: function(samples, most, fails, solves).decode()


@pytest.mark.parametrize(("samples", "most", "passes"), [(3, 9, 3), (3, 3, 3), (3, 2, 2), (0, 9, 0), (1, 1, 1)])
def test_the_passes_end_on_the_device(samples, most, passes, replayed):
    assert replayed(samples, most) == f"b{'.' * passes}e{passes} " * 3 + "0"


def test_several_loops_or_none_or_no_end(replayed):
    assert replayed(3, 9, solves=2) == "b...b...e3 " * 3 + "0"
    assert replayed(3, 9, solves=0) == "b" * 3 + "0"
    assert replayed(3, 99) == "b..." * 3 + "0"


def test_every_error_is_told_and_leaves_nothing(replayed):
    said = [replayed(3, 9, fails) for fails in range(1, 9)]
    assert [text.partition(":")[0] for text in said] == [
        *("cudaGraphCreate", "cudaGraphAddChildGraphNode", "cudaGraphConditionalHandleCreate", "cudaGraphAddNode"),
        *("cudaGraphAddNode", "cudaGraphAddChildGraphNode", "cudaGraphAddNode", "cudaGraphAddChildGraphNode"),
    ]
    assert all(text.endswith(": an error0") for text in said)
