"""Kernels of the MoE layer as registered torch ops, each beside its plain PyTorch reference. Imports nothing of ours."""
