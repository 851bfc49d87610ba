"""Rollout servers behind HTTP: SGLang and vLLM, spoken to alike."""
