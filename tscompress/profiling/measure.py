"""Where a model has rank to spare: its embedding, weights, heads, and the inputs of its layers.

What is measured follows the figures of "Understanding Transformers for Time Series: Rank
Structure, Flow-of-ranks, and Compressibility", called the paper below: embedding spectra and
angles (Fig. 2, 3), weights by layer (Fig. 4, 5, 12), heads (Fig. 16), layer inputs (Fig. 5c).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tscompress.checkpoints.given import AnyModel, loaded_of
from tscompress.checkpoints.load import LoadedModel, check_double
from tscompress.compression.activations import collect_moments
from tscompress.compression.calibration import (
    MIXED,
    OWN_SOURCES,
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
    check_calibration,
)
from tscompress.data.series import LabelledSeries, given_series, read_series
from tscompress.data.synthetic import FloatArray
from tscompress.errors import FactorizationError, UsageError
from tscompress.families.base import EmbeddingTable
from tscompress.families.registry import FAMILIES, FORECAST_FAMILIES
from tscompress.io.arguments import check_list, renamed
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import angle_matrix, break_even_rank, even_picks, fit_power_law
from tscompress.plan.architecture import Architecture, AttentionBlock, FeedForward
from tscompress.profiling.heads import HeadAngles, head_angles
from tscompress.profiling.rank_profile import (
    EmbeddingGroup,
    InputProfile,
    Part,
    PowerLawFit,
    RankProfile,
    Saving,
    Spectrum,
    WeightProfile,
    rounded,
)
from tscompress.progress import OnProgress, silent

DEFAULT_EPSILONS = (0.3, 0.1, 0.03, 0.01)
DEFAULT_CALIBRATION = CalibrationConfig()

#: Spectra are roots of eigenvalues in float64, accurate down to about 1e-7 relative.
SMALLEST_EPSILON = 1e-6
#: Rows of a token table that are decomposed; larger tables are sub-sampled evenly.
MAX_TOKEN_ROWS = 8192
MAX_COORDINATE_ROWS = 1024
MAX_ANGLE_ROWS = 64
SIGNALS_PER_GROUP = 128
PATCHES_PER_SIGNAL = 16


@renamed("loaded", "model")
def profile(
    model: AnyModel,
    *,
    epsilons: Sequence[float] = DEFAULT_EPSILONS,
    series: Sequence[FloatArray] | str | Path | None = None,
    calibration: CalibrationConfig | None = DEFAULT_CALIBRATION,
    name: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    on_progress: OnProgress = silent,
) -> RankProfile:
    """Measure the ranks of a model; the model is not changed.

    Parameters
    ----------
    model
        A directory, a Hub id, a loaded model, a Chronos pipeline or a predictor around one; see
        :mod:`tscompress.checkpoints.given`. A path may be of a family that does not forecast.
    epsilons
        Tolerances of the ε-rank, each in [1e-6, 1).
    series
        Series, each 1-D, or a file of them, to embed and to run the model on instead of
        ``calibration.source``.
    calibration
        How the model is run to see the inputs of its layers; None leaves them out.
    name, revision, device, dtype
        As for :func:`tscompress.probe`.
    on_progress
        Called with ``embedding``, ``weights`` or ``inputs``, steps done, and steps in all.

    Raises
    ------
    UsageError
        An ε is not in [1e-6, 1), an argument is of a wrong type, or nothing would read the series.
    FactorizationError
        A spectrum could not be computed; names the matrix.
    DataError, LeakError
        The series cannot be used; see
        :func:`tscompress.compression.calibration.calibration_batches`.
    """
    tolerances = _check_epsilons(epsilons)
    check_calibration(calibration, series)
    loaded = loaded_of(
        model, name=name, revision=revision, device=device, dtype=dtype, exported=False
    )
    if series is not None:
        series = given_series(series)
    corpus = None if calibration is None else _corpus_name(calibration, series)
    if series is None and calibration is not None and calibration.source not in OWN_SOURCES:
        series = read_series(calibration.source)
    reason = _why_no_inputs(loaded, calibration)
    if series is not None and reason is not None and _table_of(loaded) is not None:
        raise UsageError(f"series are given, but nothing here reads them: {reason}; give none.")
    if calibration is not None and reason is None:
        check_double(loaded.model)
    on_progress("embedding", 0, 1)
    embedding = profile_embedding(loaded, tolerances, series)
    on_progress("embedding", 1, 1)
    weights = profile_weights(loaded, tolerances, on_progress)
    inputs: tuple[InputProfile, ...] = ()
    if calibration is not None and reason is None:
        inputs = profile_inputs(loaded, tolerances, calibration, series, on_progress)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    dtype = next(loaded.model.parameters()).dtype
    width = max((weight.in_features for weight in weights), default=1)
    return RankProfile(
        model=loaded.name,
        family=loaded.family,
        dtype=str(loaded.stored_dtype).removeprefix("torch."),
        parameters=parameters,
        epsilons=tolerances,
        weight_floor=_rounding_floor(width, loaded.stored_dtype, dtype),
        input_floor=_rounding_floor(width, dtype),
        corpus=corpus if inputs else None,
        inputs_reason=reason,
        embedding=embedding,
        weights=weights,
        inputs=inputs,
        savings=_savings(weights, tolerances, parameters, loaded.stored_dtype.itemsize),
        power_laws=_power_laws(weights, tolerances),
        head_angles=_head_angles(loaded),
        compressed=loaded.plan is not None,
    )


def _check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    check_list("epsilons", epsilons, (int, float, np.number), "numbers such as 0.1")
    wrong = [epsilon for epsilon in epsilons if not SMALLEST_EPSILON <= epsilon < 1]
    if wrong or not len(epsilons):
        shown = ", ".join(map(str, wrong)) or "nothing"
        raise UsageError(f"epsilons must lie in [{SMALLEST_EPSILON:g}, 1); got {shown}. Try 0.1.")
    return tuple(sorted(set(map(float, epsilons)), reverse=True))


def _rounding_floor(width: int, *dtypes: torch.dtype) -> float:
    """Bound on relative singular values due to rounding.

    Rounding entries to relative precision u/2 perturbs a matrix W [m, n] by independent errors of
    spectral norm up to about u/(2 sqrt 3) rms(W) (sqrt m + sqrt n), and sigma_1 is at least
    rms(W) sqrt(max(m, n)); so the ratio stays below u. Eigenvalues of a ``width``-sized Gram
    matrix carry float64 rounding, and singular values are their roots.
    """
    computed = math.sqrt(torch.finfo(torch.float64).eps * width)
    return max(computed, *(torch.finfo(dtype).eps for dtype in dtypes))


def _why_no_inputs(loaded: LoadedModel, calibration: CalibrationConfig | None) -> str | None:
    if loaded.family not in FORECAST_FAMILIES:
        return f"{loaded.family} models do not forecast, so no series can be run through them"
    if calibration is None:
        return "the model was not run; weights and embedding only"
    return None


def _corpus_name(calibration: CalibrationConfig, series: Sequence[FloatArray] | None) -> str:
    if isinstance(series, LabelledSeries) and series.summary is not None:
        return series.summary.file
    if series is not None:
        return f"{len(series)} given series"
    own = {SYNTHETIC: "synthetic series", MIXED: "synthetic and real series"}
    return own.get(calibration.source, calibration.source)


def _singular_values(W: Tensor, name: str) -> Tensor:
    """Singular values of float64 ``W`` ``[..., m, n]``, descending ``[..., min(m, n)]``.

    Through the smaller Gram matrix: on layer-sized matrices that takes 0.6 of the time of an SVD,
    on heads 0.2.
    """
    wide = W.shape[-2] <= W.shape[-1]
    return _root_spectrum(W @ W.mT if wide else W.mT @ W, name)


def _root_spectrum(gram: Tensor, name: str) -> Tensor:
    """Singular values of X, descending ``[..., n]``, from ``gram`` = X^T X ``[..., n, n]``.

    Raises
    ------
    FactorizationError
        The eigenvalues could not be computed; the message has ``name``.
    """
    try:
        eigenvalues = torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise FactorizationError(f"the spectrum of {name} failed: {error}.") from error
    sigma: Tensor = eigenvalues.clamp_min(0).flip(-1).sqrt()
    return sigma


# --------------------------------------------------------------------------------------------------
# Embedding
# --------------------------------------------------------------------------------------------------


def _table_of(loaded: LoadedModel) -> EmbeddingTable | None:
    """Of models of tokens or pixels; None: patches of series are embedded."""
    return FAMILIES[loaded.family].embedding_table(loaded.model, loaded.config)


def profile_embedding(
    loaded: LoadedModel, epsilons: Sequence[float], series: Sequence[FloatArray] | None = None
) -> tuple[EmbeddingGroup, ...]:
    """Spectra of the embedded inputs (paper Fig. 2, 3).

    Models of tokens or pixels have one group, their table. Models of patches of a series have one
    for each kind of signal, after ``all signals`` together.
    """
    table = _table_of(loaded)
    if table is not None:
        return (_table_group(table, epsilons),)
    embedded = {
        name: _embed_patches(loaded, signals) for name, signals in _signals(loaded, series).items()
    }  # [N, d_model] each
    everything = torch.cat(list(embedded.values()))
    total = EmbeddingGroup(
        name="all signals",
        order="signal",
        rows=len(everything),
        rows_total=len(everything),
        spectrum=Spectrum.of(_singular_values(everything, "the embedded patches"), epsilons),
    )
    plane = _leading_plane(everything)
    orders = {"sinusoids": "frequency", "exponentials": "rate"}
    return total, *(
        _embedding_group(name, rows, plane, epsilons, order=orders.get(name, "sample"))
        for name, rows in embedded.items()
    )


def _table_group(table: EmbeddingTable, epsilons: Sequence[float]) -> EmbeddingGroup:
    weights = table.rows.cpu()  # [V, d_model]
    rows = weights[even_picks(len(weights), MAX_TOKEN_ROWS)].to(torch.float64)
    return _embedding_group(
        table.name,
        rows,
        _leading_plane(rows),
        epsilons,
        order=table.order,
        rows_total=len(weights),
    )


def _embedding_group(
    name: str,
    rows: Tensor,
    plane: Tensor,
    epsilons: Sequence[float],
    *,
    order: str,
    rows_total: int | None = None,
) -> EmbeddingGroup:
    """Describe ``rows`` ``[N, d_model]``; ``plane`` ``[d_model, 2]`` spans the projection."""
    shown = rows[even_picks(len(rows), MAX_COORDINATE_ROWS)] @ plane  # [n, 2]
    angles = angle_matrix(rows[even_picks(len(rows), MAX_ANGLE_ROWS)])
    return EmbeddingGroup(
        name=name,
        order=order,
        rows=len(rows),
        rows_total=len(rows) if rows_total is None else rows_total,
        spectrum=Spectrum.of(_singular_values(rows, f"the embedded {name}"), epsilons),
        coordinates=tuple((rounded(x), rounded(y)) for x, y in shown.tolist()),
        angles=tuple(tuple(round(angle, 3) for angle in row) for row in angles.tolist()),
    )


def _leading_plane(rows: Tensor) -> Tensor:
    """The two leading right singular vectors of ``rows`` ``[N, d]``, as columns ``[d, 2]``."""
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    leading = vectors[:, [-1, -2]] if vectors.shape[1] > 1 else vectors[:, [-1, -1]]
    # Singular vectors have no sign of their own; this one makes figures reproducible.
    signs = torch.sign(leading.gather(0, leading.abs().argmax(0, keepdim=True)))
    plane: Tensor = leading * signs
    return plane


def _signals(loaded: LoadedModel, series: Sequence[FloatArray] | None) -> dict[str, Tensor]:
    """Contexts ``[B, T]`` of each kind of signal, B in order of frequency, rate, or as given."""
    settings = loaded.config["chronos_config"]
    patches = min(PATCHES_PER_SIGNAL, settings["context_length"] // settings["input_patch_size"])
    length = max(1, patches) * settings["input_patch_size"]
    time = torch.arange(length)[None, :]
    # From one period a context to almost two steps a period, where a sampled sine vanishes.
    frequency = torch.logspace(math.log10(1 / length), math.log10(0.45), SIGNALS_PER_GROUP)
    rate = torch.linspace(-5, 5, SIGNALS_PER_GROUP) / length
    noise = torch.randn(SIGNALS_PER_GROUP, length, generator=torch.Generator().manual_seed(0))
    signals = {
        "sinusoids": torch.sin(2 * math.pi * frequency[:, None] * time),
        "exponentials": torch.exp(rate[:, None] * time),
        "white noise": noise,
    }
    if series:
        picks = even_picks(len(series), SIGNALS_PER_GROUP).tolist()
        signals["given series"] = _last_windows([series[pick] for pick in picks], length)
    return signals


def _last_windows(series: Sequence[FloatArray], length: int) -> Tensor:
    """The last ``length`` steps of each series ``[B, length]``, NaN on the left of shorter ones."""
    windows = torch.full((len(series), length), torch.nan)
    for row, values in enumerate(series):
        kept = torch.from_numpy(np.asarray(values[-length:], dtype=np.float32).copy())
        windows[row, length - len(kept) :] = kept
    return windows


@torch.no_grad()
def _embed_patches(loaded: LoadedModel, contexts: Tensor) -> Tensor:
    """Embeddings ``[N, d_model]`` of the patches of ``contexts`` ``[B, T]`` that hold data.

    They are float64: in the model's dtype, rounding would hide the end of the spectrum.
    """
    model: Any = loaded.model
    family = FAMILIES[loaded.family]
    features, observed = family.patch_features(model, contexts.to(model.device))
    embedding = copy.deepcopy(model.input_patch_embedding).cpu().double()
    embedded: Tensor = embedding(features[observed].cpu().double())
    return embedded


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------


def profile_weights(
    loaded: LoadedModel,
    epsilons: Sequence[float],
    on_progress: OnProgress = silent,
) -> tuple[WeightProfile, ...]:
    """Spectra of every attention and feed-forward projection, in forward order within each part."""
    architecture = loaded.architecture
    attention = list(architecture.attention_projections())
    feed_forward = list(architecture.feed_forward_projections())
    total = len(attention) + len(feed_forward)
    profiles = []
    for block, role, name in attention:
        profiles.append(_weight_profile(loaded.model, "attention", block, role, name, epsilons))
        on_progress("weights", len(profiles), total)
    for feed, role, name in feed_forward:
        block = _attention_before(feed, architecture)
        profiles.append(_weight_profile(loaded.model, "feed_forward", block, role, name, epsilons))
        on_progress("weights", len(profiles), total)
    return tuple(profiles)


def weight_matrix(module: nn.Module) -> Tensor:
    """The matrix that a Linear layer or its two factors apply, float64 ``[out, in]`` on the CPU."""
    if isinstance(module, LowRankLinear):
        return weight_matrix(module.left) @ weight_matrix(module.right)
    assert isinstance(module, nn.Linear)
    return module.weight.detach().cpu().double()


def head_slices(W: Tensor, role: str, num_heads: int) -> Tensor:
    """The part of ``W`` that each head owns.

    Rows of q, k and v, ``[H, d_kv, d_model]``; columns of o, ``[H, d_model, d_kv]``.
    """
    if role == "o":
        return W.reshape(W.shape[0], num_heads, -1).transpose(0, 1)
    return W.reshape(num_heads, -1, W.shape[1])


def _weight_profile(
    model: nn.Module,
    part: Part,
    block: AttentionBlock,
    role: str,
    name: str,
    epsilons: Sequence[float],
) -> WeightProfile:
    module = model.get_submodule(name)
    W = weight_matrix(module)
    heads: tuple[Spectrum, ...] = ()
    if part == "attention" and "q" in block.projections:  # values alone are of all heads together
        by_head = _singular_values(head_slices(W, role, block.num_heads), name)  # [H, min(d_kv, d)]
        heads = tuple(Spectrum.of(sigma, epsilons) for sigma in by_head)
    return WeightProfile(
        part=part,
        kind=block.kind,
        depth=block.depth,
        role=role,
        name=name,
        out_features=W.shape[0],
        in_features=W.shape[1],
        parameters=sum(p.numel() for p in module.parameters() if p.ndim == 2),
        spectrum=Spectrum.of(_singular_values(W, name), epsilons),
        heads=heads,
    )


def _head_angles(loaded: LoadedModel) -> HeadAngles | None:
    """Angles between rows of W_Q of the first block that has one."""
    for block, role, name in loaded.architecture.attention_projections():
        if role == "q":
            W = weight_matrix(loaded.model.get_submodule(name))
            return head_angles(W, block.num_heads, name)
    return None


def _attention_before(feed_forward: FeedForward, architecture: Architecture) -> AttentionBlock:
    """The last attention block of the layer that ``feed_forward`` is in."""
    place = feed_forward.stack, feed_forward.layer
    return [block for block in architecture.attention if (block.stack, block.layer) == place][-1]


def _savings(
    weights: Sequence[WeightProfile],
    epsilons: Sequence[float],
    model_parameters: int,
    bytes_per_parameter: int,
) -> tuple[Saving, ...]:
    parts: tuple[Part, ...] = ("attention", "feed_forward")
    savings = []
    for part in parts:
        chosen = [weight for weight in weights if weight.part == part]
        if not chosen:
            continue
        before = sum(weight.parameters for weight in chosen)
        for index, epsilon in enumerate(epsilons):
            left = [_parameters_at(weight, index) for weight in chosen]
            after = sum(left)
            savings.append(
                Saving(
                    part=part,
                    epsilon=epsilon,
                    projections=len(chosen),
                    factored=sum(
                        size < weight.parameters for size, weight in zip(left, chosen, strict=True)
                    ),
                    parameters_before=before,
                    parameters_after=after,
                    parameter_ratio=after / before,
                    model_parameter_ratio=1 - (before - after) / model_parameters,
                    bytes_saved=(before - after) * bytes_per_parameter,
                    macs_saved=before - after,
                )
            )
    return tuple(savings)


def _parameters_at(weight: WeightProfile, index: int) -> int:
    """Parameters after truncated SVD at the ε with this index, where that is smaller."""
    rank = max(1, weight.spectrum.ranks[index])
    if rank > break_even_rank(weight.out_features, weight.in_features):
        return weight.parameters
    return min(weight.parameters, rank * (weight.out_features + weight.in_features))


def _power_laws(
    weights: Sequence[WeightProfile], epsilons: Sequence[float]
) -> tuple[PowerLawFit, ...]:
    attention = [weight for weight in weights if weight.heads]
    if not attention:
        return ()
    fits = []
    for index, epsilon in enumerate(epsilons):
        ranks = [fmean(head.ranks[index] for head in weight.heads) for weight in attention]
        d_0, alpha = fit_power_law([weight.depth for weight in attention], ranks)
        fits.append(PowerLawFit(epsilon=epsilon, d_0=rounded(d_0), alpha=round(alpha, 4)))
    return tuple(fits)


# --------------------------------------------------------------------------------------------------
# Inputs of layers
# --------------------------------------------------------------------------------------------------


def profile_inputs(
    loaded: LoadedModel,
    epsilons: Sequence[float],
    calibration: CalibrationConfig,
    series: Sequence[FloatArray] | None = None,
    on_progress: OnProgress = silent,
) -> tuple[InputProfile, ...]:
    """Flow of ranks: spectra of what every attention and feed-forward block reads (paper Fig. 5c).

    Singular values are those of the inputs stacked as rows, over the root of their number.
    """
    batches = calibration_batches(loaded, calibration, series)
    places = list(_input_places(loaded.architecture))
    moments = collect_moments(
        loaded,
        batches,
        [name for _, _, name in places],
        lambda done: on_progress("inputs", done, len(batches)),
    )
    profiles = []
    for part, block, name in places:
        moment = moments[name]
        sigma = _root_spectrum(moment.second, f"the inputs of {name}")[: moment.count]
        profiles.append(
            InputProfile(
                part=part,
                kind=block.kind,
                depth=block.depth,
                name=name,
                positions=moment.count,
                spectrum=Spectrum.of(sigma, epsilons),
            )
        )
    return tuple(profiles)


def _input_places(architecture: Architecture) -> Iterator[tuple[str, AttentionBlock, str]]:
    """``(part, block, name)`` of one projection for every distinct input.

    q, k and v of self-attention read the same; so do the keys of all cross-attention blocks.
    """
    for block in architecture.attention:
        yield "attention", block, next(iter(block.projections.values()))
    cross = [block for block in architecture.attention if block.reads_encoder]
    if cross:
        yield "encoder_output", cross[0], cross[0].projections["k"]
    for feed in architecture.feed_forward:
        yield (
            "feed_forward",
            _attention_before(feed, architecture),
            next(name for role, name in feed.projections.items() if role.startswith("wi")),
        )
