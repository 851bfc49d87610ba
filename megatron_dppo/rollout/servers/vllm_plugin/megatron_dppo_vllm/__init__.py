"""Extension of a vLLM server that takes weights from ``megatron_dppo``, and locks its door.

The folder above goes on the server's PYTHONPATH (``servers/vllm.py`` says so for servers that we
start). It lives in vLLM's environment: it imports torch, safetensors and vLLM, and nothing else of
this project.
"""
