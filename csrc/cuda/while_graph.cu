// See while_graph.h.
#include "while_graph.h"

namespace deqfast {
namespace {

// One thread decides before the first pass, and after each: two writers of a condition at once would be undefined.
__global__ void decide(cudaGraphConditionalHandle handle, const int32_t* active, int32_t* passes, int32_t most,
                       bool first) {
  const int32_t made = first ? 0 : *passes + 1;
  *passes = made;
  cudaGraphSetConditional(handle, *active > 0 && made < most);
}

// Appends nodes to a graph, each after the one before.
class Chain {
 public:
  explicit Chain(cudaGraph_t graph) : graph_(graph) {}

  void add_child(cudaGraph_t child) {
    cudaGraphNode_t node = nullptr;
    check_cuda(cudaGraphAddChildGraphNode(&node, graph_, &last_, count(), child), "cudaGraphAddChildGraphNode");
    last_ = node;
  }

  void add(cudaGraphNodeParams& params) {
    cudaGraphNode_t node = nullptr;
#if CUDART_VERSION >= 13000
    check_cuda(cudaGraphAddNode(&node, graph_, &last_, nullptr, count(), &params), "cudaGraphAddNode");
#else
    check_cuda(cudaGraphAddNode(&node, graph_, &last_, count(), &params), "cudaGraphAddNode");
#endif
    last_ = node;
  }

  void add_loop(cudaGraph_t body, Loop loop) {
    cudaGraphConditionalHandle handle;
    check_cuda(cudaGraphConditionalHandleCreate(&handle, graph_, 0, cudaGraphCondAssignDefault),
               "cudaGraphConditionalHandleCreate");
    bool first = true;
    void* arguments[] = {&handle, &loop.active, &loop.passes, &loop.most, &first};
    cudaGraphNodeParams look{};
    look.type = cudaGraphNodeTypeKernel;
    look.kernel.func = reinterpret_cast<void*>(&decide);
    look.kernel.gridDim = dim3(1);
    look.kernel.blockDim = dim3(1);
    look.kernel.kernelParams = arguments;
    add(look);
    cudaGraphNodeParams node{};
    node.type = cudaGraphNodeTypeConditional;
    node.conditional.handle = handle;
    node.conditional.type = cudaGraphCondTypeWhile;
    node.conditional.size = 1;
    add(node);
    Chain pass(node.conditional.phGraph_out[0]);
    pass.add_child(body);
    first = false;
    pass.add(look);
  }

 private:
  size_t count() const { return last_ ? 1 : 0; }

  cudaGraph_t graph_;
  cudaGraphNode_t last_ = nullptr;
};

}  // namespace

WhileGraph::WhileGraph(const std::vector<cudaGraph_t>& graphs, const std::vector<Loop>& loops) {
  try {
    join(graphs, loops);
  } catch (...) {
    destroy();
    throw;
  }
}

void WhileGraph::join(const std::vector<cudaGraph_t>& graphs, const std::vector<Loop>& loops) {
  check_cuda(cudaGraphCreate(&graph_, 0), "cudaGraphCreate");
  Chain whole(graph_);
  for (size_t i = 0; i < graphs.size(); ++i)
    if (i % 2)
      whole.add_loop(graphs[i], loops[i / 2]);
    else
      whole.add_child(graphs[i]);
  check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
}

WhileGraph::~WhileGraph() { destroy(); }

void WhileGraph::destroy() {
  if (exec_) cudaGraphExecDestroy(exec_);
  if (graph_) cudaGraphDestroy(graph_);
}

}  // namespace deqfast
