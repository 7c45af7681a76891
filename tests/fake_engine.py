"""Stands in for an engine in tests of the start: a stdlib server that says it is ready.

Run as `python fake_engine.py HISTOGRAM ... --port N ...`: every answer has that histogram of
accepted drafts. It keeps a child process, as an engine does, and wants the key of its `--api-key`
(for `/flush_cache` that of its `--admin-api-key`).
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

READY = "The server is fired up and ready to roll!"


class Handler(BaseHTTPRequestHandler):
    # Set once, in main.
    histogram: list[int] = []  # noqa: RUF012
    key: str | None = None
    admin_key: str | None = None

    def do_POST(self) -> None:
        key = (self.path.startswith("/flush_cache") and self.admin_key) or self.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            self.send_error(401, "Unauthorized")
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        details = {"spec_correct_drafts_histogram": self.histogram}
        greedy = asked.get("sampling_params", asked).get("temperature") == 0.0
        chat = {"choices": [], "sglext": {"spec_tokens_details": details}}
        plain = {"text": "", "output_ids": [], "meta_info": details}
        answer = chat if self.path == "/v1/chat/completions" else plain
        body = json.dumps(answer if greedy else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    Handler.histogram = json.loads(sys.argv[1])
    port = int(_option("--port") or 0)
    Handler.key, Handler.admin_key = _option("--api-key"), _option("--admin-api-key")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        print(f"child {child.pid}", flush=True)
        server = HTTPServer(("127.0.0.1", port), Handler)
        print(READY, flush=True)
        server.serve_forever()


def _option(name: str) -> str | None:
    """What follows an option, or its `=`."""
    words = " ".join(sys.argv).replace("=", " ").split()
    return words[words.index(name) + 1] if name in words else None


def as_interpreter(folder: Path, histogram: list[int]) -> Path:
    """An executable that takes an engine's command line and runs this instead."""
    path = folder / "python"
    script = f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{histogram}" "$@"\n'
    path.write_text(script)
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
