"""The dispatch mode: device tensors have shapes and the values that the host can know, and
operators are booked.

The trainer reads lengths and offsets back from the device. Zeros instead would lead the trainer
into other branches, so that copies of small host tensors, and results computed from only them, keep
their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.rehearsal.booking import Book, is_pinned, mark_pinned, place, tensor_bytes

LARGEST = 1 << 21
"""Elements of the largest integer tensor that is remembered."""
LARGEST_FLOAT = 64
"""Elements of the largest floating-point tensor that is remembered."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The known value on the host, or None."""
    value: torch.Tensor | None = getattr(tensor, "_host_value", None)
    return value


def remember(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the known value by this one, if it is small."""
    forget(tensor)
    if value.numel() <= (LARGEST_FLOAT if value.is_floating_point() else LARGEST):
        tensor.__dict__["_host_value"] = value


def forget(tensor: torch.Tensor) -> None:
    """Drop the value of an overwritten tensor."""
    tensor.__dict__.pop("_host_value", None)


def follow(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> None:
    """Compute an operator on the host, if all of its tensors are known; otherwise forget the
    written tensors."""
    fakes = [
        leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, FakeTensor)
    ]
    outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
    known = (
        fakes and all(value_of(fake) is not None for fake in fakes) and "rand" not in func.name()
    )
    made: object = None
    if known:
        on_host = {"device": torch.device("cpu")} if "device" in kwargs else {}
        rest = {
            name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")
        }
        plain_args, plain_kwargs = pytree.tree_map_only(
            FakeTensor, value_of, (tuple(args), {**rest, **on_host})
        )
        try:
            made = func(*plain_args, **plain_kwargs)
        except (RuntimeError, IndexError):  # a shape that depends on an unknown value
            made = None
    values = pytree.tree_leaves(made) if made is not None else [None] * len(outputs)
    for tensor, value in zip(outputs, values, strict=False):
        if isinstance(value, torch.Tensor):
            remember(tensor, value)
        else:
            forget(tensor)


def answer(
    book: Book, func: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Book a collective of device tensors, or fill host tensors as if all ranks sent the same;
    return finished work."""
    name = func.name().removeprefix("c10d::").removesuffix("_")
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        named = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
        key = f"{name} over {ProcessGroup.unbox(named['process_group']).size()}"
        book.collectives[key] += 1
        size = max(tensor_bytes(*pytree.tree_leaves(argument)) for argument in args)
        book.collective_bytes[key] += size
        first = tensors[0].dtype
        book.launch(f"c10d::{key}", 0.0, size, first, first)
    else:
        _repeat_own_part(name, args)
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _repeat_own_part(name: str, args: Sequence[Any]) -> None:
    if name == "allgather":
        for outputs, mine in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(mine)
    elif name == "_allgather_base":
        args[0].view(-1, args[1].numel()).copy_(
            args[1].reshape(1, -1).expand(args[0].numel() // args[1].numel(), -1)
        )
    elif name == "alltoall_base" and args[0].numel() == args[1].numel():
        args[0].copy_(args[1])


aten = torch.ops.aten
NO_KERNEL = {
    aten._unsafe_view.default, aten.resize_.default, aten.set_.source_Storage_storage_offset,
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
"""Operators that allocate, and those among the makers of views that the schema does not tell."""
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
TO_HOST = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.new_empty.default, aten.new_zeros.default, aten.empty_strided.default,
}  # fmt: skip
"""Operators that make a host tensor in the shape of a device tensor, if asked for
``device="cpu"``."""
ONLY_WRITE = ("zero_", "fill_", "copy_", "normal_", "uniform_", "mm", ".out")
"""Parts of names of in-place operators that do not read the tensor that they write."""


class HostTensorError(RuntimeError):
    """A kernel received a host tensor together with device tensors."""


def check_on_device(kernel: str, *tensors: object) -> None:
    """Raise HostTensorError if one of the tensors is a host tensor."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cuda":
            raise HostTensorError(f"{kernel} received a host tensor of shape {tuple(tensor.shape)}")


class RehearsalMode(TorchDispatchMode):
    """Run operators on shapes and book them.

    Raises:
        HostTensorError: from an operator that mixes host tensors and device tensors.
        torch._subclasses.fake_tensor.UnsupportedOperatorException: from an operator without a shape
        function.
    """

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book
        self.read: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None
        """Value that the host reads of a device tensor; None: zeros."""
        self.fake = FakeTensorMode(allow_non_fake_inputs=False, allow_fallback_kernels=False)

    def __enter__(self) -> RehearsalMode:
        # Otherwise torch.tensor(..., device="cuda") makes a real CUDA tensor behind the mode's
        # back.
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new device tensor."""
        with self.fake:
            made = torch.empty(tuple(shape), dtype=dtype, device="cuda")
        self.book.allocate(made.untyped_storage())
        return made

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [
            leaf
            for leaf in pytree.arg_tree_leaves(*args, **options)
            if isinstance(leaf, torch.Tensor)
        ]
        on_device = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        device = torch.device(options["device"]).type if options.get("device") is not None else None
        if func.namespace == "prim":
            return func(*args, **options)
        if func.namespace == "c10d":
            return answer(self.book, func, args, tensors)
        pin = options.pop("pin_memory", None)
        if not on_device and device != "cuda":
            made = func(*args, **options)
            return mark_pinned(made, self.book) if pin else made
        if (
            torch.is_inference_mode_enabled() and func._can_decompose()
        ):  # autograd decomposes outside of inference mode
            with self:
                made = func.decompose(*args, **options)
            if made is not NotImplemented:
                return made
        if device == "cpu" and func in TO_HOST:
            shape = args[1] if "new_" in func.name() else args[0].shape
            made = torch.zeros(tuple(shape), dtype=options.get("dtype") or args[0].dtype)
            return mark_pinned(made, self.book) if pin else made
        special = self._special(func, args, options)
        return self._run(func, args, options) if special is NotImplemented else special

    def _special(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of an operator in which host and device meet; NotImplemented for all others."""
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        if func is aten._to_copy.default:
            return self._to(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(
                args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            )
        if func is aten.equal.default:
            return self._equal(args[0], args[1])
        if func is aten.nonzero.default:
            return self._nonzero(args[0])
        return NotImplemented

    # Meetings of host and device

    def _item(self, tensor: torch.Tensor) -> Any:
        self.book.wait("item")
        value = value_of(tensor)
        if value is not None:
            return value.item()
        return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _to(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
        target = (
            torch.device(kwargs["device"]) if kwargs.get("device") is not None else source.device
        )
        dtype, later = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if source.device.type == target.type:
            return NotImplemented
        if target.type == "cuda":
            self._wait_to_device(source, later)
            made = self.empty(source.shape, dtype)
            remember(made, source.detach().to(dtype, copy=True))
            return made
        made = self._host_copy(source, later).to(dtype)
        return mark_pinned(made, self.book) if later else made  # as torch's ``to`` does

    def _copy(self, target: torch.Tensor, source: torch.Tensor, later: bool) -> Any:
        if source.device.type == target.device.type or (source.numel() == 1 and source.dim() == 0):
            return NotImplemented
        if target.device.type == "cuda":
            self._wait_to_device(source, later)
            forget(target)
        else:
            target.copy_(self._host_copy(source, later))
        return target

    def _wait_to_device(self, source: torch.Tensor, later: bool) -> None:
        if not later:
            self.book.wait(
                "copy to the device"
                if is_pinned(source)
                else "copy of pageable memory to the device"
            )

    def _host_copy(self, source: torch.Tensor, later: bool) -> torch.Tensor:
        if not later:
            self.book.wait("copy to the host")
        value = value_of(source)
        value = self.read(source) if value is None else value.clone()
        return torch.zeros(source.shape, dtype=source.dtype) if value is None else value

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        def key(tensor: torch.Tensor) -> tuple[Any, ...]:
            return (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )

        if key(a) != key(b):  # torch does not read the device to compare a tensor with itself
            self.book.wait("equal")
        return True

    def _nonzero(self, tensor: torch.Tensor) -> torch.Tensor:
        self.book.wait("nonzero")
        value = value_of(tensor)
        rows = tensor.numel() // 2 if value is None else len(value.nonzero())
        made = self.empty((rows, tensor.dim()), torch.int64)
        if value is not None:
            remember(made, value.nonzero())
        return made

    # All other operators

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        mixed = kwargs.get("device") is not None or any(map(_on_device, leaves))
        given = (tuple(args), kwargs)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: self._lift(func, tensor, mixed), given
        )
        with self.fake:
            out = func(*args, **kwargs)
        follow(func, args, kwargs, out)
        if (
            func._overloadpacket is aten.all and value_of(out) is None
        ):  # checks of unknown values pass
            remember(out, torch.ones(out.shape, dtype=torch.bool))
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        if mixed and not (func in NO_KERNEL or func.is_view):
            self._launch(func, args, kwargs, out, outputs)
        for tensor in outputs:
            if _on_device(tensor):
                self.book.allocate(tensor.untyped_storage())
        return out

    def _lift(self, func: OpOverload, tensor: torch.Tensor, mixed: bool) -> torch.Tensor:
        """The fake tensor of a host scalar, which kernels accept as a number, or of an operator on
        the host."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if mixed and tensor.dim():
            shape = tuple(tensor.shape)
            raise HostTensorError(
                f"{func.name()} received a host tensor of shape {shape} in {place()}"
            )
        made = self.fake.from_tensor(tensor, static_shapes=True)
        remember(made, tensor)
        return made

    def _launch(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        outputs: list[FakeTensor],
    ) -> None:
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        inputs = [leaf for leaf in leaves if _on_device(leaf)]
        size = tensor_bytes(*inputs, *outputs)
        if not any(part in func.name() for part in ONLY_WRITE):
            size += tensor_bytes(
                *(each for each in outputs if any(each is given for given in inputs))
            )
        flops, factors = _flops(func, args, kwargs, out)
        floats = [each.dtype for each in (*inputs, *outputs) if each.is_floating_point()]
        dtype = factors[0].dtype if factors else floats[0] if floats else torch.int64
        product = (factors[0].shape[-2], factors[1].shape[-1]) if factors else None
        self.book.launch(
            func.name(), flops, size, dtype, outputs[0].dtype if outputs else dtype, product
        )


def _on_device(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"


def _flops(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[float, list[torch.Tensor]]:
    """FLOPs of an operator, and the two matrices of a product."""
    if func._overloadpacket in PRODUCTS:
        factors = [each for each in args if isinstance(each, torch.Tensor)][-2:]
        return 2.0 * factors[0].numel() * factors[1].shape[-1], factors
    count = flop_registry.get(func._overloadpacket)
    return (0.0 if count is None else float(count(*args, **kwargs, out_val=out))), []
