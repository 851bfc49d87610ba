#!/usr/bin/env python3
"""Megatron → Hugging Face: ``python tools/convert_ckpt/megatron_to_hf.py CKPT OUT [--verify]
[--dry-run]``."""

import sys

from megatron_dppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
