"""How fast checkpoints go up and come down, next to huggingface_hub alone, in the same run.

    python eval/hub_throughput.py --repeats 3

Against the Hub on localhost that the tests use: no network is slower than the disk here, so what
is seen is what tscompress adds: on the way up hashes, a load and a forecast before the first
request; on the way down the SHA-256 of everything that arrived. Each transfer is a process of its
own with an empty cache; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "hf_" + "LocalhostOnly" * 2
WAYS = ("push, tscompress", "push, huggingface_hub", "pull, tscompress", "pull, huggingface_hub")


def main() -> None:
    arguments = parse()
    if arguments.job:
        print(json.dumps(run(json.loads(arguments.job))))
        return
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from hub_server import HubServer

    server = HubServer()
    server.tokens = {TOKEN: ("alice",)}
    with tempfile.TemporaryDirectory() as directory, server.running():
        checkpoint = Path(directory) / "checkpoint"
        size = job(server.url, directory, {"way": "make", "size": arguments.size,
                                           "directory": str(checkpoint)})["bytes"]  # fmt: skip
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(arguments.repeats):
            for way in WAYS if repeat % 2 == 0 else reversed_pairs():
                server.lfs.clear()  # or the second would find its files there
                repo_id = f"alice/{way.replace(', ', '-')}-{repeat}"
                if way.startswith("pull"):
                    server.upload(repo_id, checkpoint)
                took = job(server.url, directory, {"way": way, "directory": str(checkpoint),
                                                   "repo_id": repo_id})  # fmt: skip
                seconds[way].append(took["seconds"])
    print(f"{size / 1e6:.0f} MB, {arguments.repeats} times each, seconds: median (all)")
    for way in WAYS:
        median = statistics.median(seconds[way])
        every = ", ".join(f"{one:.2f}" for one in seconds[way])
        print(f"{way}: {median:.2f} ({every}); {size / 1e6 / median:.0f} MB/s")


def reversed_pairs() -> list[str]:
    return [WAYS[1], WAYS[0], WAYS[3], WAYS[2]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="base", help="shape of the checkpoint, as in big.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def job(endpoint: str, home: str, content: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    cache = Path(home) / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(content)],
        env={**os.environ, **settings}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(content: dict[str, Any]) -> dict[str, Any]:
    """One transfer, timed without imports."""
    import time

    from huggingface_hub import HfApi, snapshot_download

    from tscompress.checkpoints import load as loading
    from tscompress.hub import push as hub

    directory = Path(content["directory"])
    if content["way"] == "make":
        return {"bytes": make(content["size"], directory)}
    repo_id = content["repo_id"]
    started = time.monotonic()
    if content["way"] == "push, tscompress":
        hub.push(directory, repo_id)
    elif content["way"] == "push, huggingface_hub":
        api = HfApi()
        api.create_repo(repo_id)
        api.upload_folder(repo_id=repo_id, folder_path=directory)
    elif content["way"] == "pull, tscompress":
        loading.find(repo_id)
    else:
        snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors"])
    return {"seconds": time.monotonic() - started}


def make(size: str, directory: Path) -> int:
    """A compressed checkpoint with random weights, most of them as they were; its bytes."""
    sys.path.insert(0, str(ROOT / "eval"))
    import big

    import tscompress

    source = directory.with_name(f"chronos-t5-{size}")
    big.write_checkpoint(size, source, "5GB")
    small = tscompress.compress(source, method="svd", rank=8, exclude=["*block.[1-9]*"])
    tscompress.save(small, directory)
    return sum(path.stat().st_size for path in directory.iterdir())


if __name__ == "__main__":
    main()
