"""A server that answers the requests of `wandb sync` as the servers of Weights & Biases do, and stores the history of a run."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """The server. `run_ids` contains the ids of all runs that were uploaded, and `rows` the rows of their histories."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.run_ids: set[str] = set()
        self.rows: dict[int, str] = {}  # by the number of the line

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a GraphQL request."""
        project = {"name": "ringattn", "entity": {"name": "us"}}
        if operation == "UpsertBucket":
            self.run_ids.add(variables["name"])
            run = {"id": "1", "name": variables["name"], "displayName": "run", "project": project}
            return {"upsertBucket": {"bucket": run, "inserted": not self.rows}}
        if operation == "RunResumeStatus":
            return {"model": project | {"id": "1", "bucket": self.resume_status() if self.rows else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def resume_status(self) -> dict[str, Any]:
        """Return the state of the run, which the client needs to continue the run."""
        last = self.rows[max(self.rows)]
        status = {"id": "1", "name": "run", "config": "{}", "wandbConfig": '{"t": 1}', "tags": [], "summaryMetrics": last}
        status |= {"historyLineCount": max(self.rows) + 1, "eventsLineCount": 0, "logLineCount": 0}
        return status | {"historyTail": json.dumps([last]), "eventsTail": "[]"}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        if self.path == "/graphql":
            self._reply({"data": self.server.answer(request["operationName"], request["variables"])})
        else:  # a part of the files of a run
            history = (request.get("files") or {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            self.server.rows |= dict(enumerate(history["content"], history["offset"]))
            self._reply({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply({})

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def start_server() -> Iterator[WandbServer]:
    """Run a server in a thread."""
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
