"""`transformers serve` answers a chat over HTTP from an export."""

import json
import os
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import WORDS

QUESTION = [{"role": "user", "content": " ".join(WORDS[(7 * i) % 90] for i in range(24))}]
NEW = 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve(tmp_path, modules):
    """Starts a server of its own for a checkpoint, and gives the address once it answers."""
    servers = []

    def start(folder):
        port = free_port()
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--trust-remote-code"]
        command += ["--host", "127.0.0.1", "--port", port, "--device", "cpu"]
        environment = os.environ | {"HF_MODULES_CACHE": str(modules), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        log = (tmp_path / "log").open("w")
        servers.append(subprocess.Popen([*map(str, command)], cwd="/", env=environment, stdout=log, stderr=log))
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert servers[-1].poll() is None, (tmp_path / "log").read_text()
            try:
                urlopen(f"{address}/health", timeout=5)
                return address
            except URLError:
                time.sleep(0.1)
        raise TimeoutError((tmp_path / "log").read_text())

    yield start
    for server in servers:
        server.kill()
        server.wait()


def chat(address, folder, stream):
    """The answer: its pieces if streamed, else one."""
    body = {"model": str(folder), "messages": QUESTION, "stream": stream, "max_tokens": NEW, "temperature": 0}
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        if not stream:
            return [json.load(response)["choices"][0]["message"]["content"]]
        lines = [line.decode().removeprefix("data: ").strip() for line in response]
    chunks = [json.loads(line) for line in lines if line and line != "[DONE]"]
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]


def expected(folder, trust):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


def test_a_chat_is_answered_as_by_generate(exports, serve):
    address = serve(exports.low)
    pieces = chat(address, exports.low, stream=True)
    assert "".join(pieces).split() == expected(exports.low, trust=True).split()
    assert len([piece for piece in pieces if piece]) > NEW / 2
    assert "".join(pieces) == "".join(chat(address, exports.low, stream=False))
    assert "".join(pieces).split() != expected(exports.low, trust=False).split()  # the base answers something else
