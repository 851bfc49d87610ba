"""Stands in for what a stock SGLang imports and, without CUDA, never calls: ``sgl_kernel`` and
``torchvision``.

The first holds CUDA kernels; the second comes from the registry linked against another torch, and
breaks the model classes of transformers. Both are only imported: their functions are taken from
them and never called. Should one be called after all, it says so, raises, and leaves a line in the
file that ``SGLANG_CPU_CANARY`` names, so that the tests fail even where the server swallows what it
raises.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch


class Placeholder:
    """A function or class of an absent package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        sing(self.name)

    def __getattr__(self, attribute: str) -> Placeholder:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self.name}.{attribute}")

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        sing(f"class derived from {self.name}")


def sing(name: str) -> NoReturn:
    """A placeholder was called."""
    line = f"a placeholder was called: {name}"
    print(line, file=sys.stderr, flush=True)
    with Path(os.environ["SGLANG_CPU_CANARY"]).open("a", encoding="utf-8") as canary:
        canary.write(line + "\n")
    raise NotImplementedError(line)


class AbsentPackage(types.ModuleType):
    """Whatever is taken from it is a placeholder, besides what it is given."""

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__version__ = "0"
        vars(self).update(given)
        sys.modules[name] = self

    def __getattr__(self, attribute: str) -> Placeholder:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self.__name__}.{attribute}")


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    pool: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    stride: int,
) -> None:
    """The one kernel that a CPU server does call: where each request's tokens ``start … end`` lie
    in the cache."""
    offset = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[request, start:end] = locations[offset : offset + end - start].to(pool.dtype)
        offset += end - start


def cudart() -> Any:
    """With ``--enable-return-routed-experts`` the server pins a buffer, whatever its device: here
    that does nothing."""
    return types.SimpleNamespace(cudaHostRegister=lambda *_: 0)


def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With ``--enable-lora`` the server pins small tensors, whatever its device. Torch refuses that
    without CUDA."""
    return lambda *size, pin_memory=False, **kind: make(*size, **kind)


def install() -> None:
    """Put the placeholders where ``import`` finds them."""
    torch.cuda.cudart = cudart
    torch.tensor, torch.zeros = without_pinning(torch.tensor), without_pinning(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor: tensor
    AbsentPackage("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool_cpu)
    from transformers.utils import is_torchvision_available

    if (
        is_torchvision_available()
    ):  # asked before there is a placeholder: transformers remembers the answer
        sys.exit(
            "torchvision is installed beside SGLang: uninstall it, it does not go with a CPU build "
            "of torch"
        )
    functional = AbsentPackage("torchvision.transforms.functional")
    transforms = AbsentPackage("torchvision.transforms", functional=functional)
    AbsentPackage("torchvision", transforms=transforms)
