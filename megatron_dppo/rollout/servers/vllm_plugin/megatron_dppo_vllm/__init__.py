"""Extension of a vLLM server: receives weights from ``megatron_dppo``, and locks all routes.

The parent folder belongs on the server's PYTHONPATH (``servers/vllm.py`` sets PYTHONPATH for
servers started by the run). The extension runs in vLLM's environment: imports are limited to torch,
safetensors, vLLM and this package.
"""
