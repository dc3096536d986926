"""CUDA: which kernels run, what they hold inside, and what its closed libraries would answer, by families of operators."""
