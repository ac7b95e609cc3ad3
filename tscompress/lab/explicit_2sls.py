"""A transformer written down by hand, whose block is one step of GD-2SLS.

The construction of Theorem 3.2 and Corollary 3.1 of Liang et al. (2025), eqs. 49 to 54, and of its
ridge version (Appendix C.2), with two repairs. Keys hold x_jk, because x_jk t_j is not linear in a
token. What removes the query from the sums of the second layer is one large constant: the printed
one is 0 at the start, and differs from prompt to prompt.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tscompress.errors import UsageError
from tscompress.lab.in_context import Array
from tscompress.lab.in_context_models import AttentionLayer, Block, Encoder, SelfAttention
from tscompress.lab.instruments import InstrumentPrompts, StepSizes

#: Above every |Theta_k' z - x_k| and |beta' x| of a query.
REMOVAL = 1e6


class ReluAttention(nn.Module):
    """h_i + sum_m (1/N) sum_j relu(<Q_m h_i, K_m h_j>) V_m h_j over all N tokens (Definition 3.1).

    Parameters
    ----------
    q, k
        ``[M, r, D]``.
    v
        ``[M, D, D]``.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(one, requires_grad=False) for one in (q, k, v))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, N, D]`` to ``[B, N, D]``."""
        q, k = (torch.einsum("mrd,bnd->bmnr", one, hidden) for one in (self.q, self.k))
        values = torch.einsum("med,bnd->bmne", self.v, hidden)
        scores = torch.relu(q @ k.mT)  # [B, M, N, N]
        return hidden + (scores @ values).sum(1) / hidden.shape[1]


class _Heads:
    """Matrices of heads, filled by rows: what a query, a key and a value read of a token."""

    def __init__(self, count: int, rows: int, width: int) -> None:
        self.q = torch.zeros(count, rows, width, dtype=torch.float64)
        self.k = torch.zeros_like(self.q)
        self.v = torch.zeros(count, width, width, dtype=torch.float64)

    def layer(self) -> ReluAttention:
        return ReluAttention(self.q, self.k, self.v)


class Explicit2SLS(nn.Module):
    """Looped, attention alone, without training: ``loops`` blocks make as many steps of GD-2SLS.

    A token is (z, x, y t, Theta_1 ... Theta_p, beta, x_hat, 1, t), t = 0 at the query: D = q p +
    3 p + q + 3 numbers in float64. The first layer has 2 p heads, the second 2 (p + 1), or 3 (p +
    1) with a penalty, the read-out 2. Values hold the number of tokens, so that one model serves
    prompts of one length.

    Parameters
    ----------
    p, q, n
        Regressors, instruments, labelled examples.
    sizes
        Step sizes and penalties, the same for every prompt.
    removal
        :data:`REMOVAL`; the paper's is too small.

    Raises
    ------
    UsageError
        Sizes below 1, or fewer instruments than regressors.
    """

    def __init__(self, p: int, q: int, n: int, sizes: StepSizes, removal: float = REMOVAL) -> None:
        super().__init__()
        if not (p >= 1 and q >= p and n >= 1):
            raise UsageError(f"p is {p}, q {q} and n {n}; give p and n of at least 1, and q >= p.")
        self.p, self.q_, self.n = p, q, n
        self.sizes, self.removal = sizes, removal
        self.width = q * p + 3 * p + q + 3
        self._x, self._y = q, q + p
        self._theta = self._y + 1
        self._beta = self._theta + q * p
        self._fitted = self._beta + p
        self._one, self._labelled = self.width - 2, self.width - 1
        self.first, self.second = self._first_layer(), self._second_layer()
        self.read_out = self._read_out()

    # ---------------------------------------------------------------------------------------------
    # Heads
    # ---------------------------------------------------------------------------------------------

    def _first_layer(self) -> ReluAttention:
        """x_hat of every token becomes Theta' z (eqs. 49 and 50)."""
        heads = _Heads(2 * self.p, self.q_ + 1, self.width)
        rows = torch.arange(self.q_)
        for k in range(self.p):
            for m, sign in ((2 * k, 1.0), (2 * k + 1, -1.0)):
                heads.q[m, rows, rows] = sign
                heads.q[m, self.q_, self._fitted + k] = 1
                heads.k[m, rows, self._theta + k * self.q_ + rows] = 1
                heads.k[m, self.q_, self._one] = -sign
                heads.v[m, self._fitted + k, self._one] = sign
        return heads.layer()

    def _second_layer(self) -> ReluAttention:
        """One gradient step of Theta and of beta (eqs. 51 to 54), and their penalties."""
        penalised = bool(self.sizes.ridge or self.sizes.first_ridge)
        count = 2 * (self.p + 1) + (self.p + 1 if penalised else 0)
        heads = _Heads(count, max(self.q_, self.p) + 2, self.width)
        tokens, rows = self.n + 1, torch.arange(self.q_)
        for k in range(self.p):
            theta = self._theta + k * self.q_
            for m, sign in ((2 * k, 1.0), (2 * k + 1, -1.0)):
                self._residual(heads, m, sign, theta, 0, self.q_, self._x + k)
                heads.v[m, theta + rows, rows] = -sign * tokens * self.sizes.eta
        columns = torch.arange(self.p)
        for m, sign in ((2 * self.p, 1.0), (2 * self.p + 1, -1.0)):
            self._residual(heads, m, sign, self._beta, self._fitted, self.p, self._y)
            heads.v[m, self._beta + columns, self._fitted + columns] = (
                -sign * tokens * self.sizes.alpha
            )
        if penalised:
            self._penalties(heads)
        return heads.layer()

    def _residual(
        self, heads: _Heads, m: int, sign: float, weights: int, inputs: int, count: int, target: int
    ) -> None:
        """Score of head ``m``: sign (<weights, inputs of j> - target of j), far below 0 at a query.

        ``weights``, ``inputs`` and ``target`` are offsets in a token.
        """
        rows = torch.arange(count)
        heads.q[m, rows, weights + rows] = sign
        heads.q[m, count, self._one] = -sign
        heads.q[m, count + 1, self._one] = -1
        heads.k[m, rows, inputs + rows] = 1
        heads.k[m, count, target] = 1
        heads.k[m, count + 1, self._one] = self.removal
        heads.k[m, count + 1, self._labelled] = -self.removal

    def _penalties(self, heads: _Heads) -> None:
        """p heads of Theta and one of beta, which attend everywhere alike (Appendix C.2)."""
        start = 2 * (self.p + 1)
        heads.q[start:, 0, self._one] = heads.k[start:, 0, self._one] = 1
        for k in range(self.p):
            block = self._theta + k * self.q_ + torch.arange(self.q_)
            heads.v[start + k, block, block] = -self.sizes.eta * self.sizes.first_ridge
        block = self._beta + torch.arange(self.p)
        heads.v[start + self.p, block, block] = -self.sizes.alpha * self.sizes.ridge

    def _read_out(self) -> ReluAttention:
        """The outcome of the query becomes beta' x (Corollary 3.1)."""
        heads = _Heads(2, self.p, self.width)
        rows = torch.arange(self.p)
        for m, sign in ((0, 1.0), (1, -1.0)):
            heads.q[m, rows, self._x + rows] = 1
            heads.k[m, rows, self._beta + rows] = sign
            heads.v[m, self._y, self._one] = sign
        return heads.layer()

    # ---------------------------------------------------------------------------------------------
    # Use
    # ---------------------------------------------------------------------------------------------

    def embed(self, prompts: InstrumentPrompts) -> Tensor:
        """Tokens ``[B, n + 1, D]`` with Theta, beta and x_hat at 0.

        Raises
        ------
        UsageError
            Prompts of another number of examples, regressors or instruments.
        """
        found = (*prompts.x.shape[1:], prompts.z.shape[-1])
        if found != (self.n, self.p, self.q_):
            raise UsageError(
                f"prompts have n, p, q of {found}; this model was built for "
                f"{(self.n, self.p, self.q_)}."
            )
        tokens = np.zeros((len(prompts.x), self.n + 1, self.width))
        tokens[:, :-1, : self.q_], tokens[:, -1, : self.q_] = prompts.z, prompts.query_z
        at = slice(self._x, self._x + self.p)
        tokens[:, :-1, at], tokens[:, -1, at] = prompts.x, prompts.query_x
        tokens[:, :-1, self._y] = prompts.y
        tokens[..., self._one], tokens[:, :-1, self._labelled] = 1, 1
        return torch.as_tensor(tokens)

    def step(self, tokens: Tensor) -> Tensor:
        """One block, which is one step of GD-2SLS: ``[B, n + 1, D]`` to the same."""
        return torch.as_tensor(self.second(self.first(tokens)))

    def beta(self, tokens: Tensor) -> Array:
        """Coefficients ``[B, p]`` that the tokens hold."""
        return np.asarray(tokens[:, -1, self._beta : self._beta + self.p].numpy())

    def theta(self, tokens: Tensor) -> Array:
        """The first stage ``[B, q, p]`` that the tokens hold."""
        block = tokens[:, -1, self._theta : self._theta + self.q_ * self.p]
        return np.asarray(block.reshape(-1, self.p, self.q_).mT.numpy())

    def forecast(self, tokens: Tensor) -> Array:
        """Forecasts ``[B]``: the read-out layer, and the outcome of the query in what it gives."""
        return np.asarray(self.read_out(tokens)[:, -1, self._y].numpy())

    def forward(self, tokens: Tensor, loops: int) -> Tensor:
        """Tokens ``[B, n + 1, D]`` after ``loops`` blocks."""
        for _ in range(loops):
            tokens = self.step(tokens)
        return tokens


# --------------------------------------------------------------------------------------------------
# The same with projections as Linear layers
# --------------------------------------------------------------------------------------------------


class ReluSelfAttention(SelfAttention):
    """:class:`ReluAttention` without its residual connection, with q, k, v and o as Linear layers.

    A value matrix reads as few numbers as it has columns: ``v`` picks these, ``o`` places them.
    Heads of all four have the size of queries and keys; values have zeros beyond what they read.

    Raises
    ------
    UsageError
        A value matrix reads more numbers than a head has.
    """

    def __init__(self, layer: ReluAttention) -> None:
        nn.Module.__init__(self)
        heads, size, width = layer.q.shape
        self.n_heads, self.d_model, self.head_size = heads, width, size
        self.kind, self.linear, self.softmax = "full", False, False
        read = torch.zeros(heads, size, width, dtype=layer.v.dtype)
        placed = torch.zeros(heads, width, size, dtype=layer.v.dtype)
        for head, matrix in enumerate(layer.v.detach()):
            columns = matrix.abs().sum(0).nonzero()[:, 0]
            if len(columns) > size:
                raise UsageError(
                    f"values of head {head} read {len(columns)} numbers; its queries have {size}."
                )
            rows = torch.arange(len(columns))
            read[head, rows, columns] = 1
            placed[head, :, rows] = matrix[:, columns]
        self.q, self.k = _linear(layer.q.flatten(0, 1)), _linear(layer.k.flatten(0, 1))
        self.v, self.o = _linear(read.flatten(0, 1)), _linear(placed.transpose(0, 1).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """relu(<q, k>) v, summed over the N keys and divided by N; all ``[B, heads, N, size]``."""
        return torch.relu(q @ k.mT) @ v / k.shape[-2]


class Linear2SLS(nn.Module):
    """:class:`Explicit2SLS` in the form that compression walks.

    Attributes
    ----------
    encoder
        Both layers of a block, without norms or feed-forwards.
    """

    def __init__(self, explicit: Explicit2SLS) -> None:
        super().__init__()
        self.explicit = explicit
        attention = [ReluSelfAttention(one) for one in (explicit.first, explicit.second)]
        layers = [AttentionLayer(one, nn.Identity()) for one in attention]
        self.encoder = Encoder([Block(*layers)], nn.Identity())

    def forward(self, tokens: Tensor, loops: int) -> Tensor:
        """Tokens ``[B, n + 1, D]`` after ``loops`` blocks."""
        for _ in range(loops):
            tokens = self.encoder(tokens)
        return tokens


def _linear(weight: Tensor) -> nn.Linear:
    """A Linear layer without bias of a weight ``[out, in]``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear
