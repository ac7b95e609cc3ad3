"""A rank profile as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tscompress.io.text import percent
from tscompress.linalg import even_picks
from tscompress.profiling.rank_profile import RankProfile, Spectrum

MAX_TABLE_ROWS = 12
MAX_TABLE_EPSILONS = 3


def profile_table(profile: RankProfile) -> list[Table]:
    """Tables for a terminal: embedding, layers, flow of ranks if measured, savings.

    Deep models show the means of consecutive layers, at most twelve rows per kind of attention.
    """
    tables = [_embedding_table(profile), _layer_table(profile)]
    if profile.inputs:
        tables.append(_flow_table(profile))
    tables.append(_savings_table(profile))
    return tables


def _embedding_table(profile: RankProfile) -> Table:
    table = _table("ε-rank of the embedding", left=["inputs"])
    for heading in ("vectors", "full rank", *_epsilon_headings(profile)):
        table.add_column(heading, justify="right")
    for group in profile.embedding:
        ranks = map(str, group.spectrum.ranks)
        table.add_row(group.name, str(group.rows), str(group.spectrum.full_rank), *ranks)
    return table


def _layer_table(profile: RankProfile) -> Table:
    shown = even_picks(len(profile.epsilons), MAX_TABLE_EPSILONS).tolist()
    listed = ", ".join(f"{profile.epsilons[index]:g}" for index in shown)
    table = _table(f"ε-rank of the weights in % of full rank, at ε = {listed}", left=["attention"])
    roles = list(dict.fromkeys(weight.role for weight in profile.weights))
    for heading in ("depth", *roles):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in dict.fromkeys(weight.kind for weight in profile.weights):
        members = [weight for weight in profile.weights if weight.kind == kind]
        for depths in _depth_groups(weight.depth for weight in members):
            cells = []
            for role in roles:
                chosen = [w.spectrum for w in members if w.role == role and w.depth in depths]
                cells.append(_percent_cell(chosen, shown))
            table.add_row(kind, _depth_label(depths), *cells)
        table.add_section()
    return table


def _percent_cell(spectra: Sequence[Spectrum], shown: Sequence[int]) -> str:
    if not spectra:
        return ""
    shares = [fmean(spectrum.relative_ranks()[index] for spectrum in spectra) for index in shown]
    return " ".join(f"{100 * share:3.0f}" for share in shares)


def _flow_table(profile: RankProfile) -> Table:
    table = _table(f"ε-rank of the inputs, on {escape(str(profile.corpus))}", left=["read by"])
    for heading in ("depth", "positions", "full rank", *_epsilon_headings(profile)):
        table.add_column(heading, justify="right")
    for part, name in (("attention", "{} attention"), ("encoder_output", "cross keys, values")):
        chosen = [entry for entry in profile.inputs if entry.part == part]
        for kind in dict.fromkeys(entry.kind for entry in chosen):
            members = [entry for entry in chosen if entry.kind == kind]
            for depths in _depth_groups(entry.depth for entry in members):
                rows = [entry for entry in members if entry.depth in depths]
                spectra = [entry.spectrum for entry in rows]
                ranks = zip(*(spectrum.ranks for spectrum in spectra), strict=True)
                table.add_row(
                    name.format(kind),
                    _depth_label(depths),
                    str(rows[0].positions),
                    str(spectra[0].full_rank),
                    *(f"{fmean(values):.0f}" for values in ranks),
                )
        table.add_section()
    return table


def _savings_table(profile: RankProfile) -> Table:
    table = _table("What truncated SVD at ε would leave", left=["part"])
    headings = ("ε", "smaller", "parameters", "of part", "of model", "MB saved", "M MACs saved")
    for heading in headings:
        table.add_column(heading, justify="right")
    for saving in profile.savings:
        table.add_row(
            saving.part.replace("_", "-"),
            f"{saving.epsilon:g}",
            f"{saving.factored}/{saving.projections}",
            f"{saving.parameters_after:,}",
            percent(saving.parameter_ratio, 1),
            percent(saving.model_parameter_ratio, 1),
            f"{saving.bytes_saved / 1e6:.2f}",
            f"{saving.macs_saved / 1e6:.2f}",
        )
        if saving.epsilon == profile.epsilons[-1]:
            table.add_section()
    return table


def _table(title: str, left: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    return table


def _epsilon_headings(profile: RankProfile) -> list[str]:
    return [f"ε = {epsilon:g}" for epsilon in profile.epsilons]


def _depth_groups(depths: Iterable[int]) -> list[list[int]]:
    """Consecutive depths in at most ``MAX_TABLE_ROWS`` groups of equal size."""
    ordered = sorted(set(depths))
    size = -(-len(ordered) // MAX_TABLE_ROWS)
    return [ordered[start : start + size] for start in range(0, len(ordered), max(1, size))]


def _depth_label(depths: Sequence[int]) -> str:
    return str(depths[0]) if len(depths) == 1 else f"{depths[0]}–{depths[-1]}"
