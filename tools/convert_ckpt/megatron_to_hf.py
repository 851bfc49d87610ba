#!/usr/bin/env python3
"""Megatron → Hugging Face: ``python tools/convert_ckpt/megatron_to_hf.py CKPT OUT [--verify] [--dry-run]``."""

import sys

from megatron_dppo.bridge.convert_commands import megatron_to_hf, parse_megatron_to_hf, run

if __name__ == "__main__":
    sys.exit(run(megatron_to_hf, parse_megatron_to_hf()))
