"""Time and peak memory of a full weight profile at the shape of chronos-t5-base.

    python eval/base_profile.py [--threads 2]

Random weights of the true shape (201M, bfloat16) are saved to a temporary directory; a fresh
process then loads and profiles them, as `tscompress profile DIR --weights-only` does. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket

_CHILD = """
import json, re, sys, time
import torch
torch.set_num_threads(int(sys.argv[2]))
from tscompress.checkpoints.load import load
from tscompress.profiling.measure import profile
started = time.perf_counter()
loaded = load(sys.argv[1])
between = time.perf_counter()
profile(loaded, calibration=None)
done = time.perf_counter()
# Not ru_maxrss, which starts from the peak of the process that launched this one.
peak_kb = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({
    "load_s": round(between - started, 1),
    "profile_s": round(done - between, 1),
    "peak_rss_gb": round(peak_kb * 1024 / 1e9, 2),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    recipe = PretrainRecipe(
        family="chronos-t5",
        name="base-shape",
        architecture=Architecture(
            d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12,
            context_length=512,
        ),
        stages=(Stage(steps=1, buckets=(Bucket(context_length=8, horizon=1, batch_size=1),)),),
        token_embedding="normal",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        save_pretrained(build_model(recipe), Path(directory))
        child = [sys.executable, "-c", _CHILD, directory, str(arguments.threads)]
        answer = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    print(json.dumps(json.loads(answer.splitlines()[-1]) | {"threads": arguments.threads}))


if __name__ == "__main__":
    main()
