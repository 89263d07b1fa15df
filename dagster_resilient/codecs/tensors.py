"""Tensors and arrays in one object of the safetensors format, which `safetensors.torch.load` reads without us.

Written here rather than by the safetensors library, because that copies every tensor into one block and knows neither
shared tensors nor all dtypes. The buffers of a pack *are* the memory of the tensors, so they may be changed again only
when the buffers have been written.

Stated, since values are compared by it: a tensor comes back contiguous, on the CPU, with its dtype, shape and values
bit for bit and with `requires_grad`; an expanded one comes back expanded. A view stores its own elements, not the
storage behind it. Tensors that are one view of one storage (tied weights) are stored once and come back as one object.
`.grad` is not kept.
"""

from __future__ import annotations

import ast
import base64
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_resilient.errors import IntegrityError, UnsupportedValueError
from dagster_resilient.storage.object_store import Buffer

if TYPE_CHECKING:
    import numpy as np
    import torch

# What `safetensors.torch.load` can read. Other dtypes are stored as the parts they consist of, or as bytes.
_TORCH_NATIVE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_TORCH_PAIRS = {"complex128": "F64", "complex32": "F16"}
_NUMPY_NATIVE = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64", "|b1": "BOOL",
    "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8",
}  # fmt: skip
_NUMPY_KINDS = "biufcmMSUV"
_HEADER_LENGTH = 8


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor. Without torch in the process it cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.ndarray)


def is_scalar(value: Any) -> bool:
    """Whether a value is a numpy scalar. `np.float64` is a float too, so this is asked after exact types only."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.generic)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a pack. `owner` keeps memory alive whose address is a key of the sharing table."""

    dtype: str
    shape: list[int]
    buffer: memoryview
    owner: Any


class PackWriter:
    """Collects tensors and arrays; each is answered with a reference, JSON that `PackReader` turns back into it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._shared: dict[Any, str] = {}

    def add_tensor(self, tensor: torch.Tensor, name: str, path: str) -> dict[str, Any]:
        """Add a tensor.

        Args:
            tensor: The tensor.
            name: Wished name in the pack; a number is added where it is taken.
            path: Where the tensor stands in the value, for the message of a refusal.

        Raises:
            UnsupportedValueError: Sparse, quantized, nested, without data, of a subclass, or in the middle of a graph.
        """
        _check_tensor(tensor, path)
        key = _tensor_identity(tensor)
        if key not in self._shared:
            self._shared[key] = self._free_name(name)
            self._entries[self._shared[key]] = _tensor_entry(tensor, path)
        reference: dict[str, Any] = {
            "name": self._shared[key],
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(_stored(tensor).shape),
        }
        if _stored(tensor) is not tensor:
            reference["expand"] = list(tensor.shape)
        if tensor.requires_grad:
            reference["requires_grad"] = True
        if type(tensor).__name__ == "Parameter":
            reference["parameter"] = True
        return reference

    def add_array(self, array: np.ndarray[Any, Any], name: str, path: str) -> dict[str, Any]:
        """Add a numpy array; the arguments are those of `add_tensor`."""
        description = _describe_dtype(array, path)
        if id(array) not in self._shared:
            self._shared[id(array)] = self._free_name(name)
            self._entries[self._shared[id(array)]] = _array_entry(array)
        order = "F" if _is_fortran(array) else "C"
        return {"name": self._shared[id(array)], "dtype": description, "shape": list(array.shape), "order": order}

    def buffers(self) -> list[Buffer]:
        """Return the object's bytes, or an empty list where nothing was added."""
        if not self._entries:
            return []
        # Wide items first: each then starts at a multiple of its own size.
        entries = sorted(self._entries.items(), key=lambda item: -_item_size(item[1]))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, entry in entries:
            end = offset + entry.buffer.nbytes
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return [
            len(text).to_bytes(_HEADER_LENGTH, "little") + text,
            *(entry.buffer for _, entry in entries if entry.buffer.nbytes),
        ]

    def _free_name(self, wished: str) -> str:
        name, n = wished, 1
        while name in self._entries or name == "__metadata__":
            n += 1
            name = f"{wished}#{n}"
        return name


class PackReader:
    """Turns references back into tensors and arrays. Each owns its memory: one of them does not keep all alive."""

    def __init__(self, raw: bytes | None) -> None:
        self._raw = memoryview(raw or b"")
        self._offsets: dict[str, tuple[int, int]] = {}
        self._bases: dict[str, torch.Tensor] = {}
        self._made: dict[Any, Any] = {}
        if raw:
            self._read_header()

    def _read_header(self) -> None:
        try:
            length = int.from_bytes(self._raw[:_HEADER_LENGTH], "little")
            header = json.loads(bytes(self._raw[_HEADER_LENGTH : _HEADER_LENGTH + length]))
            start = _HEADER_LENGTH + length
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self._offsets[name] = (start + begin, start + end)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"The stored tensors have no valid safetensors header: {error}") from error

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the tensor of a reference; equal references of shared tensors return the same object."""
        key = json.dumps(reference)
        if key not in self._made:
            self._made[key] = self._view(reference)
        made: torch.Tensor = self._made[key]
        return made

    def _view(self, reference: dict[str, Any]) -> torch.Tensor:
        import torch  # noqa: PLC0415 - heavy, and needed only where tensors are

        name = reference["name"]
        if name not in self._bases:
            dtype = getattr(torch, reference["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise IntegrityError(
                    f"The stored tensor {name!r} has the dtype {reference['dtype']!r}, which torch does not know."
                )
            self._bases[name] = _tensor_from(self._bytes(name), dtype, reference["shape"])
        view = self._bases[name].detach()
        if "expand" in reference:
            view = view.expand(reference["expand"])
        requires_grad = bool(reference.get("requires_grad", False))
        if reference.get("parameter"):
            return torch.nn.Parameter(view, requires_grad=requires_grad)
        return view.requires_grad_(requires_grad)

    def array(self, reference: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Return the array of a reference."""
        import numpy as np  # noqa: PLC0415 - heavy, and needed only where arrays are

        key = json.dumps(reference)
        if key not in self._made:
            shape, dtype = tuple(reference["shape"]), _dtype_from(reference["dtype"])
            fortran = reference["order"] == "F"
            array = np.empty(shape[::-1] if fortran else shape, dtype)
            if array.nbytes:
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._bytes(reference["name"]), np.uint8)
            self._made[key] = array.T if fortran else array
        made: np.ndarray[Any, Any] = self._made[key]
        return made

    def _bytes(self, name: str) -> memoryview:
        if name not in self._offsets:
            raise IntegrityError(
                f"The stored tensors hold none with the name {name!r}, which their document refers to."
            )
        begin, end = self._offsets[name]
        return self._raw[begin:end]


# ---- torch


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    import torch  # noqa: PLC0415

    def refuse(what: str, advice: str) -> None:
        raise UnsupportedValueError(f"{path} is {what}, which cannot be stored so that it comes back equal; {advice}.")

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        refuse(f"a {type(tensor).__module__}.{type(tensor).__qualname__}", "store plain tensors")
    if tensor.layout != torch.strided:
        refuse(f"a sparse tensor ({tensor.layout})", "store to_dense(), or its indices and values")
    if tensor.is_quantized:
        refuse(f"a quantized tensor ({tensor.dtype})", "store int_repr() with scale and zero point")
    if tensor.is_nested:
        refuse("a nested tensor", "store unbind() as a list")
    if tensor.device.type == "meta":
        refuse("a tensor on the meta device, which has no data", "materialize it first")
    if tensor.requires_grad and not tensor.is_leaf:
        refuse("part of an autograd graph", "store detach()")


def _tensor_identity(tensor: torch.Tensor) -> Any:
    """What two tensors share that are one view of one storage. Empty ones have no address."""
    if tensor.numel() == 0:
        return "empty", id(tensor)
    kind = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *kind


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor whose elements are distinct in memory: an expanded dimension holds one element, n times."""
    part = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            part = part.detach().narrow(dim, 0, 1)
    return part


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_entry(tensor: torch.Tensor, path: str) -> _Entry:
    import torch  # noqa: PLC0415

    part = _stored(tensor).detach()
    name, shape = _dtype_name(part.dtype), list(part.shape)
    try:
        flat = part.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        # One element, or none, counts as contiguous whatever its stride says; a view of other width needs stride 1.
        flat = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedValueError(
            f"{path} is a tensor of {part.dtype}, whose bytes torch does not give: {error}"
        ) from error
    buffer = _memory(flat.numpy())
    if name in _TORCH_NATIVE:
        return _Entry(_TORCH_NATIVE[name], shape, buffer, tensor)
    if name in _TORCH_PAIRS:
        return _Entry(_TORCH_PAIRS[name], [*shape, 2], buffer, tensor)
    return _Entry("U8", [*shape, part.itemsize], buffer, tensor)


def _tensor_from(raw: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    flat = torch.empty(raw.nbytes, dtype=torch.uint8)
    if raw.nbytes:
        flat.numpy()[:] = np.frombuffer(raw, np.uint8)
    try:
        return flat.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise IntegrityError(f"{raw.nbytes} stored bytes are no tensor of {dtype} with the shape {shape}.") from error


def _item_size(entry: _Entry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return entry.buffer.nbytes // count if count else 0


# ---- numpy


def _memory(flat: np.ndarray[Any, np.dtype[np.uint8]]) -> memoryview:
    return memoryview(flat)  # type: ignore[arg-type]  # numpy declares the buffer protocol from Python 3.12 on


def _is_fortran(array: np.ndarray[Any, Any]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _describe_dtype(array: np.ndarray[Any, Any], path: str) -> str:
    import numpy as np  # noqa: PLC0415

    if type(array) is not np.ndarray:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise UnsupportedValueError(
            f"{path} is a {kind}, which cannot be stored so that it comes back equal; store np.asarray() of it."
        )
    return _describe(array.dtype, path)


def _describe(dtype: np.dtype[Any], path: str) -> str:
    """Text that `_dtype_from` turns back into the very dtype, which is tried here."""
    from numpy.lib import format as npy  # noqa: PLC0415

    if not dtype.hasobject and dtype.kind in _NUMPY_KINDS and dtype.metadata is None:
        text = repr(npy.dtype_to_descr(dtype))
        again = _dtype_from(text)
        if again == dtype and again.type is dtype.type:
            return text
    raise UnsupportedValueError(
        f"{path} has the numpy dtype {dtype!r}, which cannot be stored exactly; convert it to a plain dtype."
    )


def _dtype_from(text: str) -> np.dtype[Any]:
    from numpy.lib import format as npy  # noqa: PLC0415

    dtype: np.dtype[Any] = npy.descr_to_dtype(ast.literal_eval(text))
    return dtype


def _array_entry(array: np.ndarray[Any, Any]) -> _Entry:
    import numpy as np  # noqa: PLC0415

    natural = np.ascontiguousarray(array.T if _is_fortran(array) else array)
    buffer = _memory(natural.reshape(-1).view(np.uint8)) if natural.nbytes else memoryview(b"")
    shape = list(array.shape[::-1] if _is_fortran(array) else array.shape)
    native = _NUMPY_NATIVE.get(array.dtype.str) if array.dtype.names is None else None
    return _Entry(native or "U8", shape if native else [buffer.nbytes], buffer, array)


def scalar_to(value: Any, path: str) -> list[Any]:
    """Return the JSON of a numpy scalar. Text and bytes go as such: numpy's fixed-width forms drop zeros at the end."""
    import numpy as np  # noqa: PLC0415

    if type(value) is np.str_:
        return ["str", {"$str": value.encode("utf-8", "surrogatepass").hex()}]
    if type(value) is np.bytes_:
        return ["bytes", {"$bytes": base64.b64encode(bytes(value)).decode()}]
    text = _describe(value.dtype, path)
    if type(value) is not value.dtype.type or not value.dtype.itemsize:
        raise UnsupportedValueError(
            f"{path} is a {type(value).__qualname__}, which cannot be stored exactly; store a plain number."
        )
    return [text, {"$bytes": base64.b64encode(value.tobytes()).decode()}]


def scalar_from(text: str, raw: Any) -> Any:
    """Return the numpy scalar of its JSON, whose second part has been decoded."""
    import numpy as np  # noqa: PLC0415

    if text == "str":
        return np.str_(raw)
    return np.bytes_(raw) if text == "bytes" else np.frombuffer(raw, _dtype_from(text), 1).copy()[0]
