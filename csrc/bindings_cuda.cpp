// The module deqfast._C_cuda. Importing it registers the CUDA kernels; build_info says how they were built.
#include <Python.h>
#include <cuda_runtime_api.h>

#include <exception>

#include "common/fc_fits.h"
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

PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:i,s:s,s:K}", "compiler", __VERSION__, "cuda", CUDART_VERSION, "sources", DEQFAST_SOURCES,
                       "torch_target_version", TORCH_TARGET_VERSION);
}

PyMethodDef methods[] = {
    {"fc_fits", fc_fits, METH_VARARGS,
     "fc_fits(device, dim, short_weight, wide_state): whether W fits the GPU's shared memory in fc_fixed_point."},
    {"build_info", build_info, METH_NOARGS, "How these kernels were built."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda",
                      "CUDA kernels of deqfast. Importing this module registers them with torch.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&module); }
