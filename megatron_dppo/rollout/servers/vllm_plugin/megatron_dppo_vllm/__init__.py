"""What a vLLM server needs to take weights from ``megatron_dppo``, and to lock its door.

The folder above goes on the server's PYTHONPATH (``servers/vllm.py`` says so for servers that we start). It lives in
vLLM's environment: it imports torch, safetensors and vLLM, and nothing else of this project.
"""
