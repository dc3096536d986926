"""CUDA: choice of kernels, memory inside them and answers of closed libraries, by families of operators."""
