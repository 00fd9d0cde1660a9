"""Count the bytes of all tensors that exist at the same time, on any device.

The meta device has tensors with shapes, but without values. On this device, a training step of any
size takes seconds and no memory, and creates the same tensors as on a GPU.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that the `with` block creates on a device.

    Args:
        device_type: The type of the device, such as "meta".

    Attributes:
        now: The bytes of the tensors that exist now.
        peak: The largest value that `now` has had since `restart`.
        launches: The number of operations so far. Operations that only make a view do not count.
    """

    # A tensor from outside is counted as soon as the block creates a view of it. A storage that
    # several tensors share is counted once. Memory that an operation frees before it returns is not
    # counted.

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = self.launches = 0
        self._alive: dict[int, weakref.ref] = {}

    def restart(self) -> int:
        """Return `peak`, and set it to the bytes of the tensors that exist now."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.launches += not func.is_view
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device_type:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive and self._alive[key]() is storage:
            return

        def freed(_: weakref.ref) -> None:
            self._alive.pop(key, None)
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
