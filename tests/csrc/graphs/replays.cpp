// A graph with loops that is replayed on the host, for test_while_graph.py.
#include "while_graph.cu"

static std::string said;
static Graph graph_of(std::function<void()> work) { return {{new Node{work}}}; }

// `solves` of `samples`, of which one ends in each pass; the calls of three replays.
extern "C" const char* replayed(int samples, int most, int fails, int solves) {
  said.clear();
  int32_t active = -1, passes = -1;
  Graph begin = graph_of([&] { said += 'b'; active = samples; });
  Graph body = graph_of([&] { said += '.'; --active; });
  Graph end = graph_of([&] { said += "e" + std::to_string(passes) + " "; });
  try {
    failing = fails;
    std::vector<cudaGraph_t> graphs{&begin};
    for (int i = 0; i < solves; ++i) graphs.insert(graphs.end(), {&body, i + 1 < solves ? &begin : &end});
    if (most == 99) graphs.pop_back();
    deqfast::WhileGraph graph(graphs, {size_t(solves), {&active, &passes, most}});
    for (int i = 0; i < 3; ++i) graph.launch(nullptr);
  } catch (const std::exception& error) {
    said = error.what();
  }
  said += std::to_string(alive);  // graphs that were not destroyed
  return said.c_str();
}
