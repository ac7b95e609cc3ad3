"""What patches cost one linear attention head that regresses in context.

Theorem 3.1 of Dange et al. (Theorem A.1 of its appendix): n examples in n / p patches z_i = (x_i1,
y_i1, ..., x_ip, y_ip), and w_hat = sum_i U z_i z_i' v with U ``[d, p (d + 1)]`` and v
``[p (d + 1)]``, for x ~ N(0, I), y = <w, x> + noise of standard deviation sigma.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tscompress.errors import UsageError


@dataclass(frozen=True)
class PatchedRegression:
    """Examples, covariates, patch size and noise.

    Attributes
    ----------
    d, n, p
        Covariates, examples, and examples of a patch; p divides n.
    sigma
        Standard deviation of the noise.
    """

    d: int
    n: int
    p: int
    sigma: float = 1.0

    def __post_init__(self) -> None:
        if self.d < 1 or self.p < 1 or self.n < 1 or self.n % self.p:
            raise UsageError(
                f"d is {self.d}, n {self.n} and the patch {self.p}; give a patch that divides n."
            )

    # Errors of w_hat, E |w_hat - w|^2.

    @property
    def printed_bound(self) -> float:
        """No unbiased head is better: p / 2 times sigma^2 d / n (Theorem 3.1)."""
        return self.p / 2 * self.sigma**2 * self.d / self.n

    @property
    def sharper_bound(self) -> float:
        """The same from two inequalities of Cauchy and Schwarz: d / (d + 1) takes the place of ½.

        The printed bound is its case d = 1.
        """
        return self.d / (self.d + 1) * self.p * self.sigma**2 * self.d / self.n

    def unbiased_error(self, squared_norm: float) -> float:
        """Of :meth:`natural_head`, exactly: p / n (sigma^2 d + (d + 1) |w|^2)."""
        return self.p / self.n * (self.sigma**2 * self.d + (self.d + 1) * squared_norm)

    @property
    def shrunken_error(self) -> float:
        """Of the best multiple of :meth:`natural_head`, biased, for w ~ N(0, I): exactly."""
        unbiased = self.unbiased_error(self.d)
        return unbiased * self.d / (unbiased + self.d)

    @property
    def least_squares_error(self) -> float:
        """Of least squares, whatever the patch: sigma^2 d / (n - d - 1) exactly.

        Raises
        ------
        UsageError
            n is at most d + 1, for which the expectation is infinite.
        """
        if self.n <= self.d + 1:
            raise UsageError(f"n is {self.n}; least squares needs more than d + 1 = {self.d + 1}.")
        return self.sigma**2 * self.d / (self.n - self.d - 1)

    # Heads.

    def natural_head(self) -> tuple[Tensor, Tensor]:
        """U and v of (1 / n) sum_i (sum_j x_ij) (sum_k y_ik), which is unbiased; float64."""
        U = torch.zeros(self.d, self.p, self.d + 1, dtype=torch.float64)
        U[:, :, :-1] = torch.eye(self.d, dtype=torch.float64)[:, None] / self.n
        v = torch.zeros(self.p, self.d + 1, dtype=torch.float64)
        v[:, -1] = 1
        return U.flatten(1), v.flatten()

    def bias_of(self, U: Tensor, v: Tensor) -> float:
        """Largest violation of the conditions for an unbiased head (eqs. 3 to 5).

        U is ``[d, p (d + 1)]``, v ``[p (d + 1)]``.
        """
        Ux, uy, vx, vy = self._parts(U, v)
        first = torch.einsum("j,djc->dc", vy, Ux) + torch.einsum("dj,jc->dc", uy, vx)
        target = self.p / self.n * torch.eye(self.d, dtype=U.dtype)
        second, third = torch.einsum("djc,jc->d", Ux, vx), uy @ vy
        return float(
            torch.stack([one.abs().max() for one in (first - target, second, third)]).max()
        )

    def noise_part(self, U: Tensor, v: Tensor) -> float:
        """E of the squared part of w_hat that the noise makes; what the bounds bound.

        U is ``[d, p (d + 1)]``, v ``[p (d + 1)]``:
        sigma^2 n / p times sum_jk |vy_j Ux_k + uy_j vx_k'|^2.
        """
        Ux, uy, vx, vy = self._parts(U, v)
        pairs = torch.einsum("j,dkc->jkdc", vy, Ux) + torch.einsum("dj,kc->jkdc", uy, vx)
        return float(self.sigma**2 * self.n / self.p * (pairs**2).sum())

    def _parts(self, U: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ux ``[d, p, d]``, uy ``[d, p]``, vx ``[p, d]``, vy ``[p]``."""
        by_point, of_v = U.reshape(self.d, self.p, -1), v.reshape(self.p, -1)
        return by_point[..., :-1], by_point[..., -1], of_v[:, :-1], of_v[:, -1]

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Patches ``[batch, n / p, p (d + 1)]`` and w ``[batch, d]``, w ~ N(0, I)."""
        w = torch.randn(batch, self.d, 1, dtype=torch.float64, generator=generator)
        x = torch.randn(batch, self.n, self.d, dtype=torch.float64, generator=generator)
        noise = torch.randn(batch, self.n, 1, dtype=torch.float64, generator=generator)
        rows = torch.cat([x, x @ w + self.sigma * noise], dim=-1)
        return rows.reshape(batch, self.n // self.p, -1), w[..., 0]

    def trained_head(
        self, steps: int, generator: torch.Generator, *, batch: int = 64, rate: float = 0.02
    ) -> tuple[Tensor, Tensor]:
        """U and v that Adam finds for E |w_hat - w|^2, from near the natural head."""
        U, v = self.natural_head()
        for one, scale in ((U, 0.1 / self.n), (v, 0.1)):
            one += scale * torch.randn(one.shape, dtype=one.dtype, generator=generator)
        U *= self.n  # weights of one size, for one learning rate
        U.requires_grad_(), v.requires_grad_()
        optimizer = torch.optim.Adam([U, v], lr=rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
        for _ in range(steps):
            z, w = self.draw(batch, generator)
            optimizer.zero_grad()
            error = ((estimates(U / self.n, v, z) - w) ** 2).sum(-1).mean()
            error.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        return U.detach() / self.n, v.detach()


def estimates(U: Tensor, v: Tensor, patches: Tensor) -> Tensor:
    """w_hat ``[batch, d]`` of patches ``[batch, n / p, p (d + 1)]`` (Theorem A.1, eq. 2)."""
    return torch.einsum("dr,bir,bi->bd", U, patches, patches @ v)


def least_squares(patches: Tensor, patch: int) -> Tensor:
    """Least squares ``[batch, d]`` on the same examples."""
    rows = patches.reshape(len(patches), patches.shape[1] * patch, -1)
    w: Tensor = torch.linalg.lstsq(rows[..., :-1], rows[..., -1:]).solution[..., 0]
    return w
