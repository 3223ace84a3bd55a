// The module deqfast._C_cuda: importing it registers the CUDA kernels; it tells how they were built.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <string>

#include "common/fc_fits.h"
#include "sources_cuda.h"

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() = "CUDA kernels of deqfast. Importing this module registers them with torch.";
  m.def("fc_fits", &deqfast::fc_fits, pybind11::arg("device"), pybind11::arg("dim"), pybind11::arg("short_weight"),
        pybind11::arg("wide_state"), "Whether fc_fixed_point serves: the GPU holds W in shared memory.");
  m.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = std::string(__VERSION__);
    info["cuda"] = CUDART_VERSION;
    info["sources"] = std::string(DEQFAST_SOURCES);
    info["torch_target_version"] = static_cast<unsigned long long>(TORCH_TARGET_VERSION);
    return info;
  });
}
