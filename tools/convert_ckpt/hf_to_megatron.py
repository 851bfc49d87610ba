#!/usr/bin/env python3
"""Hugging Face → Megatron: ``python tools/convert_ckpt/hf_to_megatron.py HF OUT [--verify]
[--dry-run]``."""

import sys

from megatron_dppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-hf", *sys.argv[1:]]))
