// The module deqfast._C_cpu: importing it registers the CPU kernels; it tells how they were built.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "sources_cpu.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Ask for 2 MB pages where Linux leaves the choice to the program: a solve's history is fresh memory, and taking it
// up 4 KB at a time costs a third of a long Broyden solve. Advice only: a refusal changes nothing but the speed.
void advise_huge_pages(uintptr_t address, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t page = 4096;
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace

PYBIND11_MODULE(_C_cpu, m) {
  m.doc() = "CPU kernels of deqfast. Importing this module registers them with torch.";
  m.def("advise_huge_pages", &advise_huge_pages, pybind11::arg("address"), pybind11::arg("bytes"));
  m.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = std::string(__VERSION__);
    info["sources"] = std::string(DEQFAST_SOURCES);
    info["without_cuda"] = std::string(DEQFAST_WITHOUT_CUDA);  // the reason; empty: the CUDA kernels were built too
    info["torch_target_version"] = static_cast<unsigned long long>(TORCH_TARGET_VERSION);
    return info;
  });
}
