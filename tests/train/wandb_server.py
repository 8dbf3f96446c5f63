"""A server that answers the requests of `wandb sync` as the servers of Weights & Biases do, and stores what it receives.

wandb stores a table twice: as a file of the run, and as an artifact. For an artifact, it creates the artifact and its manifest,
requests an address for each file, uploads the files and then the manifest, and commits the artifact.
"""

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        runs: the settings with which a run was created or continued for the last time, by the id of the run.
        rows: the rows of the history of each run, by the id of the run and the number of the row.
        files: the uploaded files, by their paths, which begin with the id of a run or "artifacts" and the id of an artifact.
        artifacts: the ids of committed artifacts, by their names.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.files: dict[str, bytes] = {}
        self.artifacts: defaultdict[str, list[str]] = defaultdict(list)
        self._created: list[str] = []  # the names of all artifacts; the id of an artifact is its index

    def history(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of a run."""
        return [json.loads(self.rows[run][line]) for line in range(len(self.rows[run]))]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a GraphQL request."""
        project = {"name": "ringattn", "entity": {"name": "us"}}
        match operation:
            case "UpsertBucket":
                name = variables["name"]
                self.runs[name] = {key: value for key, value in variables.items() if value} | self.runs.get(name, {})
                run = {"id": "1", "name": name, "displayName": "run", "project": project}
                return {"upsertBucket": {"bucket": run, "inserted": not self.rows[name]}}
            case "RunResumeStatus":
                rows = self.rows[variables["name"]]
                return {"model": project | {"id": "1", "bucket": _resume_status(rows) if rows else None}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": self._address(variables["run"], name)} for name in variables["files"]]
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            case "CreateArtifact":
                self._created.append(variables["input"]["artifactCollectionName"])
                artifact = {"id": str(len(self._created) - 1), "state": "PENDING"}
                return {"createArtifact": {"artifact": artifact | {"artifactSequence": {"latestArtifact": None}}}}
            case "CreateArtifactManifest" | "UpdateArtifactManifest":
                artifact = variables.get("artifactID") or variables["artifactManifestID"]
                file = {"id": "1", "uploadUrl": self._address("artifacts", artifact, "manifest"), "uploadHeaders": []}
                answer = {"artifactManifest": {"id": artifact, "file": file}}
                return {operation[0].lower() + operation[1:]: answer}
            case "CreateArtifactFiles":
                edges = [self._artifact_file(**file) for file in variables["input"]["artifactFiles"]]
                return {"createArtifactFiles": {"files": {"edges": edges}}}
            case "CommitArtifact":
                artifact = variables["artifactID"]
                self.artifacts[self._created[int(artifact)]].append(artifact)
                return {"commitArtifact": {"artifact": {"id": artifact, "digest": ""}}}
        return {}

    def _artifact_file(self, artifactID: str, name: str, **_: Any) -> dict[str, Any]:
        node = {"storagePath": None, "uploadUrl": self._address("artifacts", artifactID, name), "uploadHeaders": []}
        return {"node": node | {"uploadMultipartUrls": None, "artifact": {"id": artifactID}}}

    def _address(self, *parts: str) -> str:
        return "/".join([self.url, "upload", *parts])


def _resume_status(rows: dict[int, str]) -> dict[str, Any]:
    """Return the state of a run, which the client needs to continue the run."""
    last = rows[max(rows)]
    status = {"id": "1", "name": "run", "config": "{}", "wandbConfig": '{"t": 1}', "tags": [], "summaryMetrics": last}
    status |= {"historyLineCount": max(rows) + 1, "eventsLineCount": 0, "logLineCount": 0}
    return status | {"historyTail": json.dumps([last]), "eventsTail": "[]"}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        if self.path == "/graphql":
            self._reply({"data": self.server.answer(request["operationName"], request.get("variables", {}))})
        else:  # a part of the files of a run
            history = (request.get("files") or {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            run = self.path.split("/")[-2]
            self.server.rows[run] |= dict(enumerate(history["content"], history["offset"]))
            self._reply({})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.files[self.path.removeprefix("/upload/")] = content
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
