// A solve as one CUDA graph, whose loop ends on the device: begin; while (running && passes < most) body; end.
//
// begin, body and end are graphs that torch.cuda.CUDAGraph(keep_graph=True) has captured. They become child graphs, and
// their memory stays with the torch objects, which must outlive this one. No header of torch is used.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace deqfast {

static_assert(CUDART_VERSION >= 12040, "graphs with loops need CUDA 12.4 or later");

inline void check_cuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

class WhileGraph {
 public:
  // active: running samples, which the graphs count. passes: passes of the body, which this graph counts. Both are on
  // the device. Without a body (null) there is no loop; `end` may be null too.
  WhileGraph(cudaGraph_t begin, cudaGraph_t body, cudaGraph_t end, const int32_t* active, int32_t* passes, int32_t most);
  ~WhileGraph();
  WhileGraph(const WhileGraph&) = delete;
  WhileGraph& operator=(const WhileGraph&) = delete;
  void launch(cudaStream_t stream) { check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  void join(cudaGraph_t begin, cudaGraph_t body, cudaGraph_t end, const int32_t* active, int32_t* passes, int32_t most);
  void destroy();

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace deqfast
