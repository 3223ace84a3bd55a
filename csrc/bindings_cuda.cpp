// The module deqfast._C_cuda. Importing it registers the CUDA kernels; build_info says how they were built. A graph with a
// loop is a capsule, since its functions know nothing of torch.
#include <Python.h>
#include <cuda_runtime_api.h>

#include <exception>

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
  unsigned long long begin, body, end, active, passes;
  int most;
  if (!PyArg_ParseTuple(arguments, "KKKKKi:while_graph", &begin, &body, &end, &active, &passes, &most)) return nullptr;
  const auto graph = [](unsigned long long address) { return reinterpret_cast<cudaGraph_t>(address); };
  try {
    auto* made = new deqfast::WhileGraph(graph(begin), graph(body), graph(end), reinterpret_cast<int32_t*>(active),
                                         reinterpret_cast<int32_t*>(passes), most);
    return PyCapsule_New(made, kWhileGraph, destroy_graph);
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
     "while_graph(begin, body, end, active, passes, most): a graph with a loop; graphs and memory by their addresses."},
    {"launch_graph", launch_graph, METH_VARARGS, "launch_graph(graph, stream): launch it on a stream by its address."},
    {"build_info", build_info, METH_NOARGS, "How these kernels were built."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda",
                      "CUDA kernels of deqfast. Importing this module registers them with torch.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&module); }
