"""A stock SGLang server on a machine without CUDA: ``python server.py FLAGS…``, as ``python -m
sglang.launch_server``.

Its processes import this file again, so that each of them has the placeholders.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import placeholders

CPU_FLAGS = """
    --device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
    --lora-backend torch_native --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --sleep-on-idle
    --max-total-tokens 16384 --max-running-requests 64 --context-length 1024
"""
"""What has no kernel here is switched off, and memory is bounded. Later flags win."""
MEMORY_SAVER = "--enable-memory-saver"
"""What a server that shares the trainer's GPUs is started with. Without CUDA nobody has it: the
routes that release and regain memory are there all the same, and leave it alone."""


def cores(port: int) -> str:
    """A core for each tensor-parallel rank; servers at neighbouring ports begin with different
    ones."""
    ours = sorted(os.sched_getaffinity(0))
    return "|".join(str(ours[(port + i) % len(ours)]) for i in range(max(2, len(ours))))


os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
placeholders.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    given = [flag for flag in sys.argv[1:] if flag != MEMORY_SAVER]
    arguments = prepare_server_args(CPU_FLAGS.split() + given)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores(arguments.port))
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
