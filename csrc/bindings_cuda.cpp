// The module deqfast._C_cuda. Importing it registers the CUDA kernels; build_info says how they were built. A graph with a
// loop is a capsule, since its functions know nothing of torch.
#include <Python.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <vector>

#include "common/fc_fits.h"
#include "cuda/while_graph.h"
#include "sources_cuda.h"

namespace {

PyObject* fc_fits(PyObject*, PyObject* arguments) {
  long long device, dim;
  int short_weight, wide_state;
  if (!PyArg_ParseTuple(arguments, "LLpp:fc_fits", &device, &dim, &short_weight, &wide_state)) return nullptr;
  try {
    return PyBool_FromLong(deqfast::fc_fits(device, dim, short_weight, wide_state));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

constexpr const char* kWhileGraph = "deqfast.WhileGraph";

void destroy_graph(PyObject* capsule) {
  delete static_cast<deqfast::WhileGraph*>(PyCapsule_GetPointer(capsule, kWhileGraph));
}

PyObject* while_graph(PyObject*, PyObject* arguments) {
  PyObject *given_graphs, *given_loops;
  if (!PyArg_ParseTuple(arguments, "O!O!:while_graph", &PyTuple_Type, &given_graphs, &PyTuple_Type, &given_loops))
    return nullptr;
  std::vector<cudaGraph_t> graphs;
  for (Py_ssize_t i = 0; i < PyTuple_Size(given_graphs); ++i)
    graphs.push_back(static_cast<cudaGraph_t>(PyLong_AsVoidPtr(PyTuple_GetItem(given_graphs, i))));
  std::vector<deqfast::Loop> loops;
  for (Py_ssize_t i = 0; i < PyTuple_Size(given_loops); ++i) {
    unsigned long long active, passes;
    int most;
    if (!PyArg_ParseTuple(PyTuple_GetItem(given_loops, i), "KKi:while_graph", &active, &passes, &most)) return nullptr;
    loops.push_back({reinterpret_cast<int32_t*>(active), reinterpret_cast<int32_t*>(passes), most});
  }
  if (PyErr_Occurred()) return nullptr;
  if (graphs.size() / 2 != loops.size()) {
    PyErr_SetString(PyExc_ValueError, "every second graph is the body of a loop");
    return nullptr;
  }
  try {
    return PyCapsule_New(new deqfast::WhileGraph(graphs, loops), kWhileGraph, destroy_graph);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* launch_graph(PyObject*, PyObject* arguments) {
  PyObject* capsule;
  unsigned long long stream;
  if (!PyArg_ParseTuple(arguments, "OK:launch_graph", &capsule, &stream)) return nullptr;
  auto* graph = static_cast<deqfast::WhileGraph*>(PyCapsule_GetPointer(capsule, kWhileGraph));
  if (!graph) return nullptr;
  try {
    graph->launch(reinterpret_cast<cudaStream_t>(stream));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:i,s:s,s:K}", "compiler", __VERSION__, "cuda", CUDART_VERSION, "sources", DEQFAST_SOURCES,
                       "torch_target_version", TORCH_TARGET_VERSION);
}

PyMethodDef methods[] = {
    {"fc_fits", fc_fits, METH_VARARGS,
     "fc_fits(device, dim, short_weight, wide_state): whether W fits the GPU's shared memory in fc_fixed_point."},
    {"while_graph", while_graph, METH_VARARGS,
     "while_graph((part, body, part, ...), ((active, passes, most), ...)): a graph with loops, all by addresses."},
    {"launch_graph", launch_graph, METH_VARARGS, "launch_graph(graph, stream): launch it on a stream by its address."},
    {"build_info", build_info, METH_NOARGS, "How these kernels were built."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda",
                      "CUDA kernels of deqfast. Importing this module registers them with torch.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&module); }
