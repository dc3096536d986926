"""The CPU: what kernels hold inside, and how oneDNN runs convolutions."""
