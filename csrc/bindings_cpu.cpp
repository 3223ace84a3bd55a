// The modules deqfast._C_cpu and _C_cpu_avx512. Importing one registers the CPU kernels; build_info says how they were
// built. With Python's limited API, one object serves every Python from 3.10 on and every torch from 2.11 on.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <string>

#include "cpu/bound.h"
#include "sources_cpu.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

// The build defines TORCH_EXTENSION_NAME.
#define DEQFAST_INIT_OF(name) PyInit_##name
#define DEQFAST_INIT(name) DEQFAST_INIT_OF(name)
#define DEQFAST_TEXT_OF(name) #name
#define DEQFAST_TEXT(name) DEQFAST_TEXT_OF(name)

namespace {

// Ask for 2 MB pages if Linux leaves the choice to the program. A solve's history is fresh memory, and mapping it in
// pages of 4 KB costs a third of a long Broyden solve. Advice only: a refusal changes nothing but the speed.
PyObject* advise_huge_pages(PyObject*, PyObject* arguments) {
  unsigned long long address;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(arguments, "Kn:advise_huge_pages", &address, &bytes)) return nullptr;
#ifdef __linux__
  constexpr uintptr_t page = 4096;
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  Py_RETURN_NONE;
}

deqfast::BoundStep* step_of(PyObject* capsule) {
  return static_cast<deqfast::BoundStep*>(PyCapsule_GetPointer(capsule, nullptr));
}

// step(fz, k, last) with the address of fz: the number of samples that still run.
PyObject* run_step(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "step takes (fz, k, last), got %zd arguments", count);
  const void* fz = PyLong_AsVoidPtr(arguments[0]);
  const int64_t k = PyLong_AsLongLong(arguments[1]);
  const bool last = PyObject_IsTrue(arguments[2]) == 1;
  if (PyErr_Occurred()) return nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  std::string error;
  int32_t running = 0;
  try {
    running = step_of(capsule)->run(fz, k, last);
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  PyEval_RestoreThread(thread);
  if (error.empty()) return PyLong_FromLong(running);
  PyErr_SetString(PyExc_RuntimeError, error.c_str());
  return nullptr;
}

PyMethodDef step_method = {"step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_step)), METH_FASTCALL,
                           "step(fz, k, last)"};

// The function of the BoundStep at an address, which owns it.
PyObject* bound_step(PyObject*, PyObject* address) {
  void* step = PyLong_AsVoidPtr(address);
  if (step == nullptr) return nullptr;
  PyObject* capsule = PyCapsule_New(step, nullptr, [](PyObject* capsule) { delete step_of(capsule); });
  if (capsule == nullptr) return nullptr;
  PyObject* function = PyCFunction_New(&step_method, capsule);
  Py_DECREF(capsule);
  return function;
}

// "without_cuda": the reason why the CUDA kernels were not built too; empty if they were.
PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:s,s:s,s:K}", "compiler", __VERSION__, "sources", DEQFAST_SOURCES, "without_cuda",
                       DEQFAST_WITHOUT_CUDA, "torch_target_version", TORCH_TARGET_VERSION);
}

PyMethodDef methods[] = {{"advise_huge_pages", advise_huge_pages, METH_VARARGS, "advise_huge_pages(address, bytes)"},
                         {"bound_step", bound_step, METH_O, "bound_step(address): step(fz, k, last) of an op's address"},
                         {"build_info", build_info, METH_NOARGS, "How these kernels were built."},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, DEQFAST_TEXT(TORCH_EXTENSION_NAME),
                      "CPU kernels of deqfast. Importing this module registers them with torch.", -1, methods};

}  // namespace

PyMODINIT_FUNC DEQFAST_INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
