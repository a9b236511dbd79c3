"""Tensors in, tensors out: one op surface (`surface.py`), one backend chosen per device.

The alphabet of every docstring here: T rows of one step (padded to `Backend.row_multiple`),
H hidden size, I intermediate size, Q query heads, K KV heads, D head size, V vocabulary,
R rank of an adapter, E experts of a mixture, N and M output and input features of a linear layer.
"""

import os
from typing import cast

# oneMKL reads this at its first call, which must not come before: `ref.py` says what it is for.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

from manylora.kernels.surface import Backend


def load_backend(device: str) -> Backend:
    """The backend for a device; `MANYLORA_KERNELS` overrides the choice.

    Raises:
        ValueError: the name asked for is not a backend of this build.
    """
    name = os.environ.get("MANYLORA_KERNELS", "ref")
    if name != "ref":
        raise ValueError(f"MANYLORA_KERNELS={name} is not a kernel backend; there is: ref")
    from manylora.kernels.ref import ReferenceBackend  # loads torch

    # A backend is only ever handed the opaque layouts that it made itself.
    return cast(Backend, ReferenceBackend(device))
