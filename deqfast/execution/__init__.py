"""Runners of a solve: the eager loop, compiled code, CUDA graphs, exports, an op in traced regions, torch.func."""
