"""Theorems 1 and 2, Corollary 2, Figures 3 and 15: what embeddings of numbers and patches hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from verdicts import Found, Verdict, listed, plain_ticks, slope

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.families.registry import FAMILIES
from tscompress.lab.attention import spectral_norm
from tscompress.lab.bounds import (
    analytic_embedding_bound,
    patch_rank_bound,
    smooth_embedding_bound,
    swish_ellipse,
)
from tscompress.lab.embeddings import chebyshev_table, residual_patches, swish_embedding
from tscompress.lab.spectra import gaussian
from tscompress.linalg import angle_matrix, epsilon_rank, singular_values
from tscompress.plotting import (
    GREY,
    LABEL_SIZE,
    PALETTE,
    SEQUENTIAL,
    TICK_SIZE,
    new_figure,
    style_axes,
)
from tscompress.training.token_tables import fourier_token_embedding

#: Below this share of sigma_1 a singular value is rounding.
FLOOR = 1e-13
BETAS = (0.5, 1.0, 4.0, 16.0, 64.0)
EPSILONS = (0.3, 0.1, 0.03, 0.01)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """In [-1, 1]."""
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1


# --------------------------------------------------------------------------------------------------
# Theorem 1 and Corollary 2
# --------------------------------------------------------------------------------------------------

Bound = Callable[[int], float]


def _curve(name: str, sigma: Tensor, indices: Sequence[int], bound: Bound) -> pd.DataFrame:
    """sigma_{j+1} and its bound at each j, where sigma_{j+1} is more than rounding."""
    floor = FLOOR * float(sigma[0])
    rows = [
        {"curve": name, "j": j, "sigma": float(sigma[j]), "bound": bound(j)}
        for j in indices
        if float(sigma[j]) > floor
    ]
    return pd.DataFrame(rows)


def _network(d: int, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Bound]:
    """A random tanh network 1 -> 64 -> d at ``x``, and the least bound over ellipses inside it."""
    w, b = 2 * gaussian(64, generator=generator), gaussian(64, generator=generator)
    A = gaussian(d, 64, generator=generator) / 8
    poles = torch.complex(-b, torch.full_like(b, math.pi / 2)) / w
    nearest = (poles + torch.sqrt(poles - 1) * torch.sqrt(poles + 1)).abs()
    limit = float(torch.maximum(nearest, 1 / nearest).min())
    ellipses = []
    for share in (0.2, 0.4, 0.6, 0.8, 0.9, 0.95):
        rho = 1 + share * (limit - 1)
        circle = rho * torch.exp(2j * math.pi * torch.arange(512, dtype=torch.float64) / 512)
        z = (circle + 1 / circle) / 2
        values = A.to(z.dtype) @ torch.tanh(w[:, None] * z + b[:, None])
        ellipses.append((rho, float(values.abs().max())))

    def bound(j: int) -> float:
        return min(
            analytic_embedding_bound(j, d, len(x), rho=rho, maximum=maximum)
            for rho, maximum in ellipses
        )

    return A @ torch.tanh(w[:, None] * x + b[:, None]), bound


def _corollary_2_printed(d: int, L: int) -> tuple[float, float]:
    """sigma_2 / sigma_1 of the printed functions, and sigma / bound for |w_i v_i| = 1 alone."""
    generator = seeded(3)
    x = uniform(L, generator=generator)
    printed = uniform(d, 1, generator=generator) * x**2 / (1 + torch.exp(-0.25 * x))
    flat = singular_values(printed)
    w = torch.logspace(0, 3, d, dtype=torch.float64)
    w[::2] *= -1
    sigma = singular_values(swish_embedding(x, w, 1 / w, 0.25))
    rho, maximum = swish_ellipse(0.25)
    steep = _curve(
        "steep", sigma, range(d),
        lambda j: analytic_embedding_bound(j, d, L, rho=rho, maximum=maximum),
    )  # fmt: skip
    return float(flat[1] / flat[0]), float((steep["sigma"] / steep["bound"]).max())


def theorem_1(quick: bool) -> Found:
    """Singular values of smooth and analytic embeddings against their bounds."""
    d, L = (32, 128) if quick else (128, 1024)
    generator = seeded(0)
    x, centres = uniform(L, generator=generator), uniform(d, generator=generator)
    w, v = uniform(d, generator=generator), uniform(d, generator=generator)
    curves, ranks, decays = [], {}, {}
    for nu, variation in ((1, 2.0), (3, 12.0)):
        sigma = singular_values((x - centres[:, None]).abs() ** nu)
        curves.append(
            _curve(
                f"|x - t|^{nu}", sigma, range(nu + 2, d),
                lambda j, nu=nu, variation=variation: smooth_embedding_bound(
                    j, d, L, nu=nu, variation=variation
                ),
            )
        )  # fmt: skip
    for beta in BETAS:
        sigma = singular_values(swish_embedding(x, w, v, beta))
        rho, maximum = swish_ellipse(beta)
        name = f"beta {beta:g}"
        curves.append(
            _curve(
                name, sigma, range(d),
                lambda j, rho=rho, maximum=maximum: analytic_embedding_bound(
                    j, d, L, rho=rho, maximum=maximum
                ),
            )
        )  # fmt: skip
        ranks[beta] = [epsilon_rank(sigma, epsilon) for epsilon in (0.1, 0.01, 1e-4, 1e-8)]
        last = curves[-1]
        decays[beta] = float(last["sigma"].iloc[1] / last["sigma"].iloc[-1]) ** (
            1 / (last["j"].iloc[-1] - 1)
        )
    embedded, bound = _network(d, x, generator)
    curves.append(_curve("tanh network", singular_values(embedded), range(d), bound))
    frame = pd.concat(curves, ignore_index=True)
    return Found(_theorem_1_verdicts(frame, ranks, decays, d, L), frame, _theorem_1_figure(frame))


def _worst(frame: pd.DataFrame, *starts: str) -> float:
    part = frame[frame["curve"].str.startswith(starts)]
    return float((part["sigma"] / part["bound"]).max())


def _theorem_1_verdicts(
    frame: pd.DataFrame, ranks: dict[float, list[int]], decays: dict[float, float], d: int, L: int
) -> list[Verdict]:
    kinks = [frame[frame["curve"] == f"|x - t|^{nu}"] for nu in (1, 3)]
    slopes = [
        slope(part["j"], part["sigma"])
        for part in (one[(one["j"] >= 8) & (one["j"] < 3 * d // 4)] for one in kinks)
    ]
    flat, steep = _corollary_2_printed(64 if d < 64 else d, 256 if d < 64 else L)
    smooth, network, swish = (
        _worst(frame, "|x"), _worst(frame, "tanh"), _worst(frame, "beta")
    )  # fmt: skip
    rates = [swish_ellipse(beta)[0] for beta in BETAS]
    return [
        Verdict(
            "Theorem 1.1", "embeddings |x - t|^ν, ν = 1 and 3, are below the bound",
            f"largest σ/bound {smooth:.2g}", "at most 1", smooth <= 1,
        ),
        Verdict(
            "Theorem 1.1", "σ_j falls at least as j^-ν", f"slopes {listed(slopes)}",
            "at most -1 and -3", slopes[0] <= -1 and slopes[1] <= -3,
        ),
        Verdict(
            "Theorem 1.2", "a random tanh network is below the bound of its best ellipse",
            f"largest σ/bound {network:.2g}", "at most 1", network <= 1,
        ),
        Verdict(
            "Corollary 2, printed", "w_i v_i x² / (1 + e^(-βx)) is Time-MoE's embedding",
            f"σ_2/σ_1 {flat:.0e}", "fails: without w_i in the exponent Ψ has rank 1",
            flat > 1e-10, False,
        ),
        Verdict(
            "Corollary 2, printed", "with w_i in the exponent, |w_i v_i| ≤ 1 suffices",
            f"largest σ/bound {steep:.1g} for β = 0.25, |w_i| up to 1000",
            "fails: above 1", steep <= 1, False,
        ),
        Verdict(
            "Corollary 2, repaired", "|w_i|, |w_i v_i| ≤ 1; ρ = 1 + π/(2β), M = ((ρ + 1/ρ)/2)²",
            f"largest σ/bound {swish:.2g}", "at most 1", swish <= 1,
        ),
        Verdict(
            "Corollary 2, repaired", f"σ_j falls at least as ρ^-j, ρ = {listed(rates)}",
            f"factors {listed([decays[beta] for beta in BETAS])} for β = {listed(BETAS)}",
            "each at least ρ",
            all(decays[beta] >= rho for beta, rho in zip(BETAS, rates, strict=True)),
        ),
        Verdict(
            "Corollary 2, repaired", "Time-MoE embeds numbers in few dimensions",
            f"ranks at 0.1, 0.01, 1e-4, 1e-8: {ranks[0.5]} for β = 0.5, {ranks[64.0]} for β = 64",
            f"at most 16 of {d}", max(ranks[64.0]) <= 16,
        ),
    ]  # fmt: skip


def _theorem_1_figure(frame: pd.DataFrame) -> Figure:
    figure = new_figure(10.4, 3.4)
    panels = figure.subplots(1, 3)
    shown = (
        (r"$|x - t|^\nu$", ("|x - t|^1", "|x - t|^3")),
        ("Time-MoE's swish", tuple(f"beta {beta:g}" for beta in BETAS)),
        ("tanh network 1 → 64 → d", ("tanh network",)),
    )
    for axes, (title, names) in zip(panels, shown, strict=True):
        style_axes(axes, xlabel="j", ylabel=r"$\sigma_{j+1}$, dashed: its bound", title=title)
        for color, name in zip(PALETTE, names, strict=False):
            part = frame[frame["curve"] == name]
            label = name.replace("beta", "β =").replace("|x - t|^", "ν = ")
            axes.plot(part["j"], part["sigma"], "o-", ms=2.5, lw=1, color=color, label=label)
            axes.plot(part["j"], part["bound"], "--", lw=1, color=color)
        axes.set_yscale("log")
        if len(names) > 1:
            columns = 1 if len(names) < 3 else 3
            axes.legend(frameon=False, fontsize=TICK_SIZE, loc="upper right", ncols=columns)
    panels[0].set_xscale("log")
    plain_ticks(panels[0].xaxis, (4, 8, 16, 32, 64, 128))
    panels[0].set_xlim(2.7, 1.1 * frame["j"].max())
    panels[1].set_ylim(1e-12, 1e8)
    return figure


# --------------------------------------------------------------------------------------------------
# Theorem 2, Figure 3 and the continuity of embeddings
# --------------------------------------------------------------------------------------------------


def _random_layers(k: int, d: int, hidden: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """W_1, W_2, W_3 with entries N(0, 1 / fan-in)."""
    shapes = ((hidden, k), (d, hidden), (d, k))
    return tuple(gaussian(*s, generator=generator) / math.sqrt(s[1]) for s in shapes)


def _random_patches(k: int, d: int, L: int) -> tuple[Tensor, float]:
    """Singular values of embedded Gaussian patches at random initialisation, and |W_2| |W_1 X|."""
    generator = seeded(k)
    X = gaussian(k, L, generator=generator)
    W_1, W_2, W_3 = _random_layers(k, d, 4 * d, generator)
    scale = spectral_norm(W_2) * spectral_norm(W_1 @ X)
    return singular_values(residual_patches(X, W_1, W_2, W_3)), scale


def _signals(length: int, number: int) -> dict[str, Tensor]:
    """Contexts ``[number, length]``: sines of many periods, and white noise."""
    time = torch.arange(length, dtype=torch.float32)
    frequency = torch.logspace(math.log10(1 / length), math.log10(0.45), number)
    noise = torch.randn(number, length, generator=seeded(0))
    return {"sines": torch.sin(2 * math.pi * frequency[:, None] * time), "white noise": noise}


@torch.no_grad()
def embedded_patches(loaded: LoadedModel, contexts: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Embeddings ``[N, d]`` of the patches of each ``[B, T]`` by a Chronos-Bolt, and |W_2| |W_1 X|.

    In float64; X are the patches ``[N, 2 k]`` of all contexts, observed values and their mask.
    """
    model: Any = loaded.model
    layer = model.input_patch_embedding.to(torch.float64)
    read = [FAMILIES[loaded.family].patch_features(model, one) for one in contexts]
    patches = [features[observed].to(torch.float64) for features, observed in read]
    hidden = torch.nn.functional.linear(
        torch.cat(patches), layer.hidden_layer.weight, layer.hidden_layer.bias
    )
    scale = spectral_norm(layer.output_layer.weight) * spectral_norm(hidden)
    return [layer(one) for one in patches], scale


def _continuity(d: int) -> dict[str, Tensor]:
    """Spectra at initialisation: token tables as rows, continuous maps of as many inputs."""
    generator = seeded(1)
    centres = torch.linspace(-15, 15, 1024)
    W = _random_layers(1, d, 4 * d, generator)
    x = torch.linspace(-1, 1, 1024, dtype=torch.float64)
    w, v = uniform(d, generator=generator), uniform(d, generator=generator)
    return {
        "token table N(0, 1)": gaussian(1024, d, generator=generator),
        "Fourier table of the recipes": fourier_token_embedding(centres, d),
        "residual network, k = 16": residual_patches(
            gaussian(16, 1024, generator=generator), *_random_layers(16, d, 4 * d, generator)
        ),
        "residual network, k = 1": residual_patches(x[None], *W),
        "Time-MoE, β = 1": swish_embedding(x, w, v, 1.0),
    }


def theorem_2(quick: bool) -> Found:
    """Ranks of embedded patches against patch size, angles, and continuous against token tables."""
    d, L = (64, 512) if quick else (256, 4096)
    sizes = (1, 2, 4, 8, 16) if quick else (1, 2, 4, 8, 16, 32)
    patches = {k: _random_patches(k, d, L) for k in sizes}
    contexts = list(_signals(256, 16 if quick else 128).values())
    (sines, noise), scale = embedded_patches(load("reference/bolt", dtype="float32"), contexts)
    trained = singular_values(torch.cat([sines, noise]))
    continuity = {name: singular_values(E) for name, E in _continuity(d).items()}
    angles = {
        "Bolt, sines": angle_matrix(_even(sines, 64)),
        "Bolt, white noise": angle_matrix(_even(noise, 64)),
        "random, R^16": angle_matrix(gaussian(64, 16, generator=seeded(5))),
        "random, R^768": angle_matrix(gaussian(64, 768, generator=seeded(6))),
    }
    curves = {f"k = {k}": sigma for k, (sigma, _) in patches.items()}
    curves |= {"reference/bolt, trained": trained} | continuity
    frame = pd.DataFrame(
        {"curve": name, "j": j, "relative": float(value / sigma[0])}
        for name, sigma in curves.items()
        for j, value in enumerate(sigma, 1)
    )
    verdicts = _theorem_2_verdicts(patches, trained, scale, continuity, angles, d)
    return Found(verdicts, frame, _theorem_2_figure(curves, continuity, angles))


def _even(rows: Tensor, number: int) -> Tensor:
    return rows[torch.linspace(0, len(rows) - 1, number).long()]


def _mean_angle(angles: Tensor) -> float:
    off = ~torch.eye(len(angles), dtype=torch.bool)
    return float(angles[off].mean())


def share_of_bound(sigma: Tensor, scale: float, k: int, *, biases: bool) -> float:
    """The largest share of the bound of Theorem 2: at sigma_j = eps scale there are j values."""
    bounds = [patch_rank_bound(k, float(value) / scale, biases=biases) for value in sigma]
    return max(j / bound for j, bound in enumerate(bounds, 1))


def _theorem_2_verdicts(
    patches: dict[int, tuple[Tensor, float]],
    trained: Tensor,
    scale: float,
    continuity: dict[str, Tensor],
    angles: dict[str, Tensor],
    d: int,
) -> list[Verdict]:
    share = max(share_of_bound(sigma, of, k, biases=False) for k, (sigma, of) in patches.items())
    of_bolt = share_of_bound(trained, scale, 16, biases=True)
    leading = [float(sigma[0]) / of for sigma, of in patches.values()]
    ranks = {e: [epsilon_rank(sigma, e) for sigma, _ in patches.values()] for e in EPSILONS}
    steady = [row for epsilon, row in ranks.items() if epsilon != 0.1]
    rising = all(a <= b for row in steady for a, b in pairwise(row))
    mean = {name: _mean_angle(matrix) for name, matrix in angles.items()}
    own = [epsilon_rank(trained, epsilon) for epsilon in EPSILONS]
    tables = {name: epsilon_rank(sigma, 0.1) for name, sigma in continuity.items()}
    names = list(tables)
    return [
        Verdict(
            "Theorem 2", "at most (1 + ε⁻²)k values are above ε‖W_2‖‖W_1X‖",
            f"largest share of the bound {share:.2f}, k = {listed(list(patches))}",
            "at most 1", share <= 1,
        ),
        Verdict(
            "Theorem 2 with biases", "the same with k + 1 for reference/bolt, trained",
            f"largest share of the bound {of_bolt:.2g}; σ_1 is {float(trained[0]) / scale:.2g} of "
            "the scale", "at most 1", of_bolt <= 1,
        ),
        Verdict(
            "Theorem 2, reading", "‖W_2‖‖W_1X‖ is σ_1(Φ), so the theorem bounds an ε-rank",
            f"σ_1 is {min(leading):.2f} to {max(leading):.2f} of it",
            "fails: not 1, and the bound is below d only for ε > √(k/(d - k)), "
            f"{math.sqrt(16 / (d - 16)):.2f} at k = 16, d = {d}",
            min(leading) > 0.999, False,
        ),
        Verdict(
            "Figure 3a", "the rank of embedded patches rises with the patch size",
            "; ".join(f"ε {e:g}: {listed(row, 3)}" for e, row in ranks.items()),
            "rising at 0.3, 0.03 and 0.01, random initialisation", rising,
        ),
        Verdict(
            "Figure 3a", f"the trained reference/bolt, k = 16 of d = {len(trained)}, has low rank",
            f"{listed(own, 3)} at ε = {listed(EPSILONS)}", "at most 32", max(own) <= 32,
        ),
        Verdict(
            "Figure 3b", "embedded patches of Bolt are closer than random vectors in R^16",
            "mean angles " + ", ".join(f"{name} {angle:.2f}" for name, angle in mean.items()),
            "both of Bolt below R^16, that below R^768",
            max(mean["Bolt, sines"], mean["Bolt, white noise"])
            < mean["random, R^16"] < mean["random, R^768"],
        ),
        Verdict(
            "Section 2", "continuous embeddings are low-rank from random initialisation on, "
            "token tables are not",
            "0.1-ranks: " + ", ".join(f"{name} {rank}" for name, rank in tables.items()),
            f"the random table has all {d}; k = 1 and Time-MoE at most 3",
            tables[names[0]] == d and max(tables[names[3]], tables[names[4]]) <= 3,
        ),
    ]  # fmt: skip


def _theorem_2_figure(
    curves: dict[str, Tensor],
    continuity: dict[str, Tensor],
    angles: dict[str, Tensor],
) -> Figure:
    figure = new_figure(10.4, 6.2)
    above, below = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    left, right = above.subplots(1, 2)
    _spectra(left, {name: one for name, one in curves.items() if name not in continuity}, 1e-9, 2)
    left.set_title("patches of k values, embedded (Fig. 3a)", fontsize=10, loc="left")
    _spectra(right, continuity, 1e-7, 1)
    right.set_title("at random initialisation", fontsize=10, loc="left")
    panels = below.subplots(1, 4)
    for axes, (name, matrix) in zip(panels, angles.items(), strict=True):
        image = axes.imshow(matrix.numpy(), cmap=SEQUENTIAL, vmin=0, vmax=math.pi / 2)
        mean = _mean_angle(matrix)
        axes.set_title(f"{name}, mean {mean:.2f}", fontsize=LABEL_SIZE, loc="left")
        axes.tick_params(labelsize=TICK_SIZE)
        axes.set_xlabel("i", fontsize=LABEL_SIZE)
    panels[0].set_ylabel("j", fontsize=LABEL_SIZE)
    bar = below.colorbar(image, ax=panels, shrink=0.8)
    bar.set_label("angle (Fig. 3b)", fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)
    return figure


def _spectra(axes: Axes, curves: dict[str, Tensor], least: float, columns: int) -> None:
    style_axes(axes, xlabel="j", ylabel=r"$\sigma_j / \sigma_1$")
    colors = (*PALETTE, "black", GREY)
    for color, (name, sigma) in zip(colors, curves.items(), strict=False):
        axes.plot(range(1, len(sigma) + 1), sigma / sigma[0], lw=1.3, color=color, label=name)
    axes.set_yscale("log")
    axes.set_ylim(least, 1.5)
    axes.legend(frameon=False, fontsize=TICK_SIZE, loc="lower right", ncols=columns)


# --------------------------------------------------------------------------------------------------
# Figure 15
# --------------------------------------------------------------------------------------------------


def figure_15(quick: bool) -> Found:
    """Two coordinates of Chebyshev embeddings of the numbers from -15 to 15."""
    d, number = (64, 512) if quick else (768, 4096)
    values = torch.linspace(-15, 15, number, dtype=torch.float64)
    ranks = (1, 2, 3, 8, 32)
    tables = {k: chebyshev_table(values, k, d, seeded(k)) for k in ranks}
    found = [epsilon_rank(singular_values(table), 1e-10) for table in tables.values()]
    figure = new_figure(10.4, 2.5)
    panels = figure.subplots(1, len(ranks))
    rows = []
    for axes, (k, table) in zip(panels, tables.items(), strict=True):
        style_axes(axes, xlabel="coordinate 1", title=f"k = {k}")
        drawn = axes.scatter(table[:, 0], table[:, 1], c=values, s=2, cmap=SEQUENTIAL, lw=0)
        axes.set_aspect("equal", adjustable="datalim")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        rows += [
            {"k": k, "x": float(x), "first": float(row[0]), "second": float(row[1])}
            for x, row in zip(values[::16], table[::16], strict=True)
        ]
    panels[0].set_ylabel("coordinate 2", fontsize=LABEL_SIZE)
    bar = figure.colorbar(drawn, ax=panels)
    bar.set_label("x", fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)
    verdict = Verdict(
        "Figure 15", "Φ_k has algebraic rank k", f"{listed(found, 3)} for k = {listed(ranks, 3)}",
        "k", found == list(ranks),
    )  # fmt: skip
    return Found([verdict], pd.DataFrame(rows), figure)
