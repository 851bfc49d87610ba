"""Rollout servers behind HTTP: SGLang and vLLM, with a common interface."""
