"""What runs a compiled solve in place of the eager loop: compiled code, CUDA graphs, one launch."""
