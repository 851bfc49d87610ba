"""What the tests of process handling start in a server's place: it takes a server's flags, and
answers /health.

``STAND_IN`` says what else it does: ``fails`` ends at once, ``stubborn`` ignores SIGTERM and
``late`` waits for the file named by ``STAND_IN_WAITS_FOR`` before it listens. Each has a child in a
session of its own (unless ``together``), which has a child in turn, and neither of them notices
anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

GRANDCHILD = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'"well"')


def main(flags: list[str]) -> None:
    does = os.environ.get("STAND_IN", "")
    config = flags[flags.index("--config") + 1]
    print(f"the secret is read: {Path(config).read_text(encoding='utf-8').strip()}", flush=True)
    if does == "fails":
        sys.exit("no such model " + "." * 500)
    if does == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", GRANDCHILD], start_new_session=does != "together")
    while does == "late" and not Path(os.environ["STAND_IN_WAITS_FOR"]).exists():
        time.sleep(0.01)
    HTTPServer(
        (flags[flags.index("--host") + 1], int(flags[flags.index("--port") + 1])), Answer
    ).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
