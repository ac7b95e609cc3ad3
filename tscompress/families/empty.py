"""Models without weights, and the lock of what must not happen while one is built."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import init_empty_weights

try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

#: Held while models are built or loaded: accelerate and transformers change ``nn.Module`` and
#: ``torch.nn.init`` for the whole process meanwhile, and other threads would build on that.
BUILDING = threading.RLock()


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models on the meta device, without initialising weights.

    Initialisation on the meta device took longer than the rest of a load.
    """
    with BUILDING, init_empty_weights(include_buffers=False), no_init_weights():
        yield
