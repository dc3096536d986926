"""Diffusion pipelines."""
