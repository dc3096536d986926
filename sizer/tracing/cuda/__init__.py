"""CUDA: what kernels take and hold inside, one module per family of operators, and who knows the sizes that shapes do not give."""
