"""The paper's layer-peeled problems: their numerical optima beside what its theorems say of them."""
