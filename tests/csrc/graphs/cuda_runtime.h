// A runtime of CUDA graphs on the host, for test_while_graph.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
struct dim3 { dim3(int = 1, int = 1, int = 1) {} };
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaGraphNodeTypeKernel = 0, cudaGraphNodeTypeConditional = 13;
constexpr int cudaGraphCondTypeWhile = 1;
constexpr unsigned cudaGraphCondAssignDefault = 1;
using cudaGraphConditionalHandle = unsigned long long;
using cudaStream_t = void*;
struct Node { std::function<void()> run; };
using cudaGraphNode_t = Node*;
struct Graph { std::vector<Node*> nodes; };  // in a chain
using cudaGraph_t = Graph*;
using cudaGraphExec_t = Graph*;
struct cudaGraphNodeParams {
  int type;
  struct { void* func; dim3 gridDim, blockDim; void** kernelParams; } kernel;
  struct { cudaGraphConditionalHandle handle; int type; unsigned size; cudaGraph_t* phGraph_out; } conditional;
};

inline int failing = 0, alive = 0;  // which call fails
inline std::vector<int> conditions;
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline int result() { return --failing == 0; }
inline void run(Graph* graph) { for (Node* node : graph->nodes) node->run(); }
using Work = std::function<void()>;
inline int append(Node** node, Graph* graph, Node** after, size_t count, Work work) {
  if (count != !graph->nodes.empty() || (count && *after != graph->nodes.back())) return 1;  // not a chain
  graph->nodes.push_back(*node = new Node{work});
  return result();
}
inline int cudaGraphCreate(Graph** graph, unsigned) { ++alive; return *graph = new Graph, result(); }
inline int cudaGraphDestroy(Graph*) { return --alive, 0; }
inline int cudaGraphInstantiate(Graph** exec, Graph* graph, unsigned) {
  if (result()) return 1;
  return ++alive, *exec = graph, 0;
}
inline int cudaGraphExecDestroy(Graph*) { return --alive, 0; }
inline int cudaGraphLaunch(Graph* exec, cudaStream_t) { return run(exec), 0; }
inline int cudaGraphConditionalHandleCreate(unsigned long long* handle, Graph*, unsigned initial, unsigned) {
  return *handle = conditions.size(), conditions.push_back(initial), result();
}
inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) { conditions[handle] = value; }
inline int cudaGraphAddChildGraphNode(Node** node, Graph* graph, Node** after, size_t count, Graph* child) {
  return append(node, graph, after, count, [copy = *child]() mutable { run(&copy); });
}
inline int cudaGraphAddNode(Node** node, Graph* graph, Node** after, void*, size_t count, cudaGraphNodeParams* p) {
  if (p->type == cudaGraphNodeTypeConditional) {
    Graph* body = new Graph;
    static Graph* out;
    out = body;
    p->conditional.phGraph_out = &out;
    const auto handle = p->conditional.handle;
    return append(node, graph, after, count, [body, handle] { while (conditions[handle]) run(body); });
  }
  using Kernel = void (*)(unsigned long long, const int32_t*, int32_t*, int32_t, bool);
  void** a = p->kernel.kernelParams;  // whose values are copied now
  const auto kernel = reinterpret_cast<Kernel>(p->kernel.func);
  const auto call = std::bind(kernel, *(unsigned long long*)a[0], *(const int32_t**)a[1], *(int32_t**)a[2],
                              *(int32_t*)a[3], *(bool*)a[4]);
  return append(node, graph, after, count, call);
}
