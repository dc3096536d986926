"""Rules of the CPU: kernels, their results and the memory inside them, one module for each family of operators."""
