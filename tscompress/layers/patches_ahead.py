"""The last layer of a Chronos-2 at the positions that a forecast reads, for training.

These are the patches ahead, the last ones. Of the others the last layer needs keys and values of
time attention, and nothing after that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from chronos.chronos2 import Chronos2Model
from torch import Tensor, nn


@contextmanager
def last_layer_of_patches_ahead(model: nn.Module) -> Iterator[None]:
    """Within the block, ``forward`` of a Chronos-2 skips what its forecast does not read.

    Forecasts and gradients are the same, up to rounding. Hidden states of the last layer are zeros
    elsewhere, so ``embed`` is not to be called within. Other models are unchanged.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Chronos2Model):
                _LastLayer(module, hooks)
        yield


class _LastLayer:
    """Hooks on a model; they read how many patches are ahead in each pass.

    The last pass decides until the next one begins, as a layer may run again in its backward pass.
    """

    def __init__(self, model: Chronos2Model, hooks: ExitStack) -> None:
        self._signature = inspect.signature(model.forward)
        self.ahead = self.positions = 0
        time, group, feed_forward = model.encoder.block[-1].layer
        for handle in (
            model.register_forward_pre_hook(self._count, with_kwargs=True),
            time.register_forward_hook(self._cut),
            group.register_forward_pre_hook(self._cut_mask, with_kwargs=True),
            feed_forward.register_forward_hook(self._pad),
        ):
            hooks.callback(handle.remove)

    def _count(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        self.ahead = given.arguments["num_output_patches"]

    def _cut(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Hidden states ``[B, T, d_model]`` after time attention, at the patches ahead."""
        self.positions = output[0].shape[1]
        output.hidden_states = output[0][:, -self.ahead :]
        return output

    def _cut_mask(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The mask ``[T, 1, B, B]`` of group attention, at the patches ahead; None stays."""
        mask = kwargs["attention_mask"]
        if mask is None:  # of a univariate model
            return args, kwargs
        return args, {**kwargs, "attention_mask": mask[-self.ahead :]}

    def _pad(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """As many positions as the model expects."""
        return nn.functional.pad(output, (0, 0, self.positions - self.ahead, 0))
