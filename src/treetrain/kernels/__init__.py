"""Kernels for GPUs, each compared with its reference before its first use."""
