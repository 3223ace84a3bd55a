"""Layer-peeled problems of Sun & Shi (NeurIPS 2024): numerical optima, against which the paper's theorems are held."""
