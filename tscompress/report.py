"""What :func:`tscompress.run` leaves for people: tables, figures, and one page that ties them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from tscompress.api import RunResult
from tscompress.evaluation import evaluation_table, relative
from tscompress.figures import ComparisonRow, comparison_figure, save_profile_figures
from tscompress.files import write_text_atomically
from tscompress.latency import bench_table
from tscompress.profile_tables import profile_table
from tscompress.recipe import Recipe

_TEMPLATE = """\
# {{ recipe.model }}, compressed

{{ headline }}

```
{{ plan_summary }}
```
{% if quality %}
## Forecast quality

Ratios to the original; below 1 is better. The last row is the geometric mean.

| dataset | series | WQL original | compressed | ratio | MASE original | compressed | ratio |
|---|--:|--:|--:|--:|--:|--:|--:|
{% for row in quality -%}
| {{ row.dataset }} | {{ row.series }} | {{ "%.4f"|format(row.wql[0]) }} | \
{{ "%.4f"|format(row.wql[1]) }} | {{ "%.3f"|format(row.wql_ratio) }} | \
{{ "%.3f"|format(row.mase[0]) }} | {{ "%.3f"|format(row.mase[1]) }} | \
{{ "%.3f"|format(row.mase_ratio) }} |
{% endfor -%}
| **geometric mean** | | | | **{{ "%.3f"|format(ratios.WQL) }}** | | | \
**{{ "%.3f"|format(ratios.MASE) }}** |

Against seasonal naive the compressed model has WQL {{ "%.3f"|format(naive.WQL) }} and MASE \
{{ "%.3f"|format(naive.MASE) }}.
{% endif -%}
{% if costs %}
## Cost

| | original | compressed | ratio |
|---|--:|--:|--:|
{% for row in costs -%}
| {{ row.label }} | {{ row.original }} | {{ row.compressed }} | {{ "%.3f"|format(row.ratio) }} |
{% endfor %}
{{ cost_note }}
{% endif -%}
{% for figure in figures %}
![{{ figure.stem.replace("_", " ") }}]({{ figure.as_posix() }})
{% endfor -%}
{% if findings %}
## Ranks

{% for line in findings -%}
- {{ line }}
{% endfor -%}
{% endif %}
## Reproduce

Save as `recipe.yaml` and run `tscompress run recipe.yaml`:

```yaml
{{ recipe_yaml }}```
"""


def write_report(result: RunResult, recipe: Recipe) -> Path:
    """Write ``report.md``, ``report.json``, ``scores.csv``, ``profile/`` and figures."""
    directory = result.directory
    figures: list[Path] = []
    if result.profile is not None:
        result.profile.save(directory / "profile")
        figures += save_profile_figures(result.profile, directory / "profile")
    ratios = _quality_ratios(result)
    if result.compressed is not None and result.original is not None:
        result.compressed.to_csv(directory / "scores.csv")
        result.original.to_csv(directory / "scores-original.csv")
    if result.baseline is not None:
        result.baseline.to_csv(directory / "scores-seasonal-naive.csv")
    if ratios is not None and result.bench is not None:
        path = directory / "comparison.png"
        comparison_figure([_comparison_row(result, ratios)]).savefig(path, dpi=150)
        figures.insert(0, path)
    content = {
        "recipe": recipe.model_dump(mode="json"),
        "plan": result.plan.model_dump(mode="json"),
        "attention_parameter_ratio": result.plan.attention_parameter_ratio,
        "relative": ratios,
        "relative_to_seasonal_naive": _naive_ratios(result),
        "bench": None if result.bench is None else result.bench.to_dict(),
    }
    write_text_atomically(directory / "report.json", json.dumps(content, indent=2) + "\n")
    text = jinja2.Template(_TEMPLATE, trim_blocks=False).render(
        recipe=recipe,
        headline=headline(result),
        plan_summary=result.plan.summary(),
        quality=_quality_rows(result),
        ratios=ratios,
        naive=_naive_ratios(result),
        costs=_cost_rows(result),
        cost_note=_cost_note(result),
        figures=[figure.relative_to(directory) for figure in figures],
        findings=[] if result.profile is None else result.profile.findings(),
        recipe_yaml=recipe.to_yaml(),
    )
    path = directory / "report.md"
    write_text_atomically(path, text)
    return path


def report_tables(result: RunResult) -> list[Any]:
    """Rich tables and lines of everything that was measured, for a terminal."""
    shown: list[Any] = []
    if result.profile is not None:
        shown += [*profile_table(result.profile), "\n".join(result.profile.findings())]
    if result.compressed is not None:
        shown.append(evaluation_table(result.compressed, result.original, result.baseline))
    if result.bench is not None:
        shown.append(bench_table(result.bench))
    return [*shown, result.plan.summary(), headline(result)]


def headline(result: RunResult) -> str:
    """One sentence: what was kept, what it cost, what it saved. Good news or bad."""
    kept = f"Attention keeps {result.plan.attention_parameter_ratio:.1%} of its parameters"
    before, after = result.plan.parameters("feed_forward")
    if after < before:
        kept += f", feed-forwards {after / before:.1%}"
    parts = [kept]
    ratios = _quality_ratios(result)
    if ratios is not None:
        parts.append(
            f"WQL is {ratios['WQL']:.3f} and MASE {ratios['MASE']:.3f} times the original's"
        )
    if result.bench is not None:
        name = result.bench.models[-1].name
        cost = result.bench.ratios(name)
        parts.append(
            f"a forecast takes {cost['latency_ms']:.2f} of the time with "
            f"{cost['parameters']:.2f} of all parameters"
        )
    return "; ".join(parts) + "."


def _quality_ratios(result: RunResult) -> dict[str, Any] | None:
    if result.compressed is None or result.original is None:
        return None
    return relative(result.compressed, result.original)


def _naive_ratios(result: RunResult) -> dict[str, Any] | None:
    if result.compressed is None or result.baseline is None:
        return None
    return relative(result.compressed, result.baseline)


def _quality_rows(result: RunResult) -> list[dict[str, Any]]:
    ratios = _quality_ratios(result)
    if ratios is None or result.original is None or result.compressed is None:
        return []
    return [
        {
            "dataset": small.dataset,
            "series": small.series_count,
            "wql": (dense.WQL, small.WQL),
            "mase": (dense.MASE, small.MASE),
            "wql_ratio": ratios["datasets"][small.dataset]["WQL"],
            "mase_ratio": ratios["datasets"][small.dataset]["MASE"],
        }
        for dense, small in zip(result.original.rows, result.compressed.rows, strict=True)
    ]


_COSTS = {
    "latency_ms": ("median latency (ms)", "{:,.1f}"),
    "parameters": ("parameters", "{:,}"),
    "bytes_on_disk": ("bytes on disk", "{:,}"),
    "macs": ("MACs a forecast", "{:,}"),
    "kv_cache_bytes": ("KV-cache bytes", "{:,}"),
    "peak_memory_bytes": ("peak memory in bytes", "{:,}"),
}


def _cost_rows(result: RunResult) -> list[dict[str, Any]]:
    if result.bench is None:
        return []
    original, compressed = result.bench.models
    ratios = result.bench.ratios(compressed.name)
    rows = []
    for key, (label, form) in _COSTS.items():
        values = (getattr(original, key), getattr(compressed, key))
        if None in values or ratios.get(key) is None:
            continue
        rows.append(
            {
                "label": label,
                "original": form.format(values[0]),
                "compressed": form.format(values[1]),
                "ratio": ratios[key],
            }
        )
    return rows


def _cost_note(result: RunResult) -> str:
    if result.bench is None:
        return ""
    low_high = result.bench.latency_ratio_interval(result.bench.models[-1].name)
    spread = "" if low_high is None else f" (95 % interval {low_high[0]:.2f} to {low_high[1]:.2f})"
    work = result.bench.workload
    return (
        f"Both models took turns in one process on {work.device}, batch {work.batch_size}, context "
        f"{work.context_length}, horizon {work.horizon}; the latency ratio{spread} is of medians."
    )


def _comparison_row(result: RunResult, ratios: dict[str, Any]) -> ComparisonRow:
    assert result.bench is not None
    name = result.bench.models[-1].name
    cost = result.bench.ratios(name)
    sizes = result.plan.uniform_sizes
    label = f"{result.plan.method}, attention {result.plan.attention_parameter_ratio:.0%}"
    if sizes is not None:
        label = f"fold, d_kv {sizes[0]}, d_ff {sizes[1]}"
    return ComparisonRow(
        label, ratios["WQL"], ratios["MASE"], cost["latency_ms"], cost["parameters"]
    )
