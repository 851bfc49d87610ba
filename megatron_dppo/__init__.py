"""Reinforcement learning of Qwen3 policies on Megatron-Core with Dynamic Pruning Policy Optimization."""

__version__ = "0.1.0"
