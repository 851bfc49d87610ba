"""Reward functions for the tests of the workers. The completion says what the function does."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ORPHAN = """
import subprocess, sys
child = subprocess.Popen(["sleep", "120"], start_new_session=True)
print(child.pid, file=open(sys.argv[1], "a"))
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A float, or one of the ways to return none."""
    match solution_str.split():
        case ["score", number]:
            return float(number)
        case ["spin"]:
            while True:
                pass
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return 0.5
        case ["deaf"]:  # holds the interpreter's lock in C, and ignores a polite signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.PyDLL(None).pause()
        case ["allocate", mebibytes]:
            return float(len(bytearray(int(mebibytes) * 2**20)) > 0)
        case ["backtrack"]:
            re.match(r"(a+)+$", "a" * 60 + "b")
        case ["raise", what]:
            raise ValueError(what)
        case ["busy", seconds]:  # of processor time
            began = time.process_time()
            while time.process_time() < began + float(seconds):
                pass
            return 1.0
        case ["fork"]:
            if os.fork() == 0:
                return 99.0
            return 1.0
        case ["fork-raise"]:
            if os.fork() == 0:
                sys.exit("the child's own")
            os.wait()
            return 1.0
        case [
            "leave",
            file,
        ]:  # three processes that outlive the call: plain, in a session of its own, orphaned
            for own, orphaned in ((False, False), (True, False), (True, True)):
                if orphaned:
                    subprocess.run([sys.executable, "-c", ORPHAN, file], check=True)
                else:
                    child = subprocess.Popen(["sleep", "120"], start_new_session=own)
                    with Path(file).open("a") as pids:
                        print(child.pid, file=pids)
            return 1.0
        case ["exit"]:
            sys.exit(3)
        case ["exit-at-once"]:
            os._exit(5)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["killed-once", file]:
            if not Path(file).exists():
                Path(file).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0
        case ["pid"]:
            return float(os.getpid())
        case ["modules"]:
            return float(any(name in sys.modules for name in ("torch", "numpy", "megatron")))
        case ["threads"]:
            return float(os.environ["OMP_NUM_THREADS"])
        case ["echo"]:
            return {"score": float(ground_truth) + extra_info["add"], "acc": data_source == "here"}
    raise AssertionError(solution_str)
