// The module deqfast._C_cpu: importing it registers the CPU kernels; it tells how they were built.
#include <pybind11/pybind11.h>

#include <string>

PYBIND11_MODULE(_C_cpu, m) {
  m.doc() = "CPU kernels of deqfast. Importing this module registers them with torch.";
  m.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = std::string(__VERSION__);
    info["torch_target_version"] = static_cast<unsigned long long>(TORCH_TARGET_VERSION);
    return info;
  });
}
