"""Rehearsal of the GPU path: one rank runs on a CUDA device that computes nothing and books the
work."""
