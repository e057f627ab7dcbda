"""A device that computes nothing and fails where a program waits for it: torch's meta device, watched."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class BlockingCallError(AssertionError):
    """A call that waits for the device."""


class FakeDevice(TorchDispatchMode):
    """Fails on any upload or download that would wait; reads of values fail on the meta device anyway.

    Attributes:
        uploads: Copies to the device.
        downloads: Copies from the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads = self.downloads = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check one operation."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name == "copy_" and tensors[0].device != tensors[1].device:
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                raise BlockingCallError("a copy that waits")
            if tensors[0].device == META:
                self.uploads += 1
            else:
                self.downloads += 1
                return tensors[0]  # the meta device has nothing to copy
        if name == "lift_fresh" and tensors[0].device == META:
            raise BlockingCallError("a tensor of Python numbers made on the device: a pageable upload")
        if name == "_to_copy" and kwargs.get("device") not in (None, tensors[0].device):
            raise BlockingCallError("a tensor moved between host and device: a pageable copy")
        if name in ("index", "index_put_", "index_put") and tensors[0].device == META:
            for index in args[1]:
                if index is not None and (index.device != META or index.dtype == torch.bool):
                    raise BlockingCallError("an index of the host, or a mask")
        return func(*args, **kwargs)
