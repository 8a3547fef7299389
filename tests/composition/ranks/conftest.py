"""Several processes that train together, on gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("training.py")


def start(program, world, *arguments):
    """Start so many ranks of a program, with the environment that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(started, seconds):
    """Wait for ranks to end, and return code, output and errors of each."""
    try:
        answers = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *answer) for process, answer in zip(started, answers, strict=True)]


@pytest.fixture(scope="session")
def seen(tmp_path_factory):
    """What every rank of one, of two and of four processes has seen: {(processes, rank): {case: figures}}."""
    folder = tmp_path_factory.mktemp("ranks")
    answers = finish(start(WORKER, 2, folder), 180)  # what they save, the others load
    together = [start(WORKER, world, folder) for world in (1, 4)]
    for started in together:
        answers += finish(started, 180)
    assert [code for code, *_ in answers] == [0] * 7, answers
    return {
        (world, rank): torch.load(folder / f"seen-{world}-{rank}.pt") for world in (1, 2, 4) for rank in range(world)
    }
