// Work with loops that the device ends, as one flat CUDA graph: part; while (running && passes < most) body; part; ...
//
// Parts and bodies are graphs that torch.cuda.CUDAGraph(keep_graph=True) has captured. They become child graphs, which
// may hold no loops themselves. Their memory stays with the torch objects, which must outlive this one. No header of
// torch is used.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace deqfast {

static_assert(CUDART_VERSION >= 12040, "graphs with loops need CUDA 12.4 or later");

inline void check_cuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

// active: running samples, which the graphs count. passes: passes of the body, which the joined graph counts, at most
// `most`. Both are on the device.
struct Loop {
  const int32_t* active;
  int32_t* passes;
  int32_t most;
};

class WhileGraph {
 public:
  // graphs: part, body of the first loop, part, body of the second, and so on; the last part may be absent.
  WhileGraph(const std::vector<cudaGraph_t>& graphs, const std::vector<Loop>& loops);
  ~WhileGraph();
  WhileGraph(const WhileGraph&) = delete;
  WhileGraph& operator=(const WhileGraph&) = delete;
  void launch(cudaStream_t stream) { check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  void join(const std::vector<cudaGraph_t>& graphs, const std::vector<Loop>& loops);
  void destroy();

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace deqfast
