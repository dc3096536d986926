"""The CPU: its own kernels, their results and what they hold inside, one module for each family of operators."""
