"""Answers over HTTP with the scores of a trained run, a checkpoint or an export. For a try on this
machine: it speaks plain HTTP on loopback, and one request after the other.

    python serve.py ../runs/mine 8000
    curl -d '[{"user": 7, "item": 3, "price": 2.5}]' http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import pandas as pd

from runtime import open_model

MOST_BYTES = 16 * 1024**2

model = open_model(sys.argv[1])
TASKS = model.layout.tasks


class Scores(BaseHTTPRequestHandler):
    """A list of samples comes, an object by column each; a list of scores by task goes."""

    def do_POST(self) -> None:
        """Score the samples of one request, or say what does not fit."""
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if not 0 < size <= MOST_BYTES:
                raise ValueError(f"a body has 1 to {MOST_BYTES:,} bytes, this one {size:,}")
            samples = pd.DataFrame.from_records(json.loads(self.rfile.read(size)))
            scores = model.predict_frame(samples)
            status, answer = 200, [dict(zip(TASKS, map(float, row), strict=True)) for row in scores]
        except (ValueError, TypeError, AttributeError) as error:  # JSON or columns that do not fit
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Scores)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
