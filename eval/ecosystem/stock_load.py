"""chronos-forecasting as its README shows it, and a Chronos-T5 as transformers' own model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import job
import torch

PIPELINES = {
    "chronos-t5": "ChronosPipeline",
    "chronos-bolt": "ChronosBoltPipeline",
    "chronos-2": "Chronos2Pipeline",
}


def ways(task: job.Job) -> Iterator[job.Way]:
    kind: job.Kind = "samples" if task.family == "chronos-t5" else "quantiles"
    for name in ("BaseChronosPipeline", PIPELINES[task.family]):
        # One name for the three classes: a row of the table is a way, a column a family.
        shown = name if name.startswith("Base") else "the family's own pipeline class"
        yield job.Way(shown, kind, lambda name=name: forecast(task, name))
    if task.family == "chronos-t5":
        yield job.Way("transformers' AutoModelForSeq2SeqLM", "logits", lambda: logits(task))


def forecast(task: job.Job, name: str) -> Any:
    import chronos

    return job.pipeline_forecast(getattr(chronos, name).from_pretrained(task.checkpoint), task)


def logits(task: job.Job) -> Any:
    """Of arbitrary tokens: transformers knows no series."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(task.checkpoint).eval()
    tokens = torch.tensor(job.tokens(task))
    with torch.no_grad():
        found = model(input_ids=tokens, decoder_input_ids=tokens[:, : task.horizon])
    return found.logits.float()


if __name__ == "__main__":
    job.main(ways)
