#!/usr/bin/env python3
"""Hugging Face → Megatron: ``python tools/convert_ckpt/hf_to_megatron.py HF OUT [--verify] [--dry-run]``."""

import sys

from megatron_dppo.bridge.convert_commands import hf_to_megatron, parse_hf_to_megatron, run

if __name__ == "__main__":
    sys.exit(run(hf_to_megatron, parse_hf_to_megatron()))
