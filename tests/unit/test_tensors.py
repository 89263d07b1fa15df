"""Tensors: bit-exact in every dtype, readable by plain safetensors, shared where they were shared, else refused."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from dagster_resilient import codecs
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

torch.set_num_threads(1)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(
        torch.bool,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]


def packed(value):
    """Return the joined parts of a value."""
    return {role: b"".join(buffers) for role, buffers in codecs.encode(value).parts.items()}


def round_trip(value):
    """Encode and decode a value as a store would do it."""
    return codecs.decode("document/1", packed(value), {})


def bits(tensor):
    """Return the bytes of a tensor."""
    return bytes(tensor.detach().contiguous().clone().untyped_storage())


def random_bits(dtype, *shape):
    """Return a tensor of any dtype with random bits, NaN patterns included."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 3)], ids=str)
def test_every_dtype_and_shape_is_exact_to_the_bit(dtype, shape):
    """NaN payloads included; also without dimensions and without elements."""
    value = random_bits(dtype, *shape)
    back = round_trip({"x": value})["x"]
    assert (back.dtype, back.shape, bits(back)) == (value.dtype, value.shape, bits(value))


def test_a_state_dict_is_read_by_plain_safetensors_under_its_own_names():
    """Weights are not locked in: the safetensors library alone reads the object."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {
        key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for key, tensor in model.state_dict().items()
    }
    plain = safetensors.torch.load(packed(state)["tensors.safetensors"])
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[key], state[key]) and plain[key].dtype == state[key].dtype for key in state)


def test_all_dtypes_in_one_object_are_read_by_plain_safetensors():
    """Dtypes that its reader lacks are stored as the parts they consist of."""
    value = {str(dtype): random_bits(dtype, 4) for dtype in DTYPES}
    plain = safetensors.torch.load(packed(value)["tensors.safetensors"])
    assert all(bits(plain[key]) == bits(value[key]) for key in value)


def test_a_state_dict_keeps_its_type_and_metadata():
    """It comes back as an OrderedDict with module versions, in order."""
    state = torch.nn.BatchNorm1d(4).state_dict()
    back = round_trip(state)
    assert type(back) is type(state)
    assert list(back) == list(state)
    assert back._metadata == state._metadata


def test_a_view_stores_its_own_elements_only():
    """Ten elements of a 4 MB storage are not 4 MB."""
    big = torch.arange(1_000_000, dtype=torch.float32)
    parts = packed({"x": big[5:15]})
    assert sum(map(len, parts.values())) < 1024
    assert torch.equal(codecs.decode("document/1", parts, {})["x"], big[5:15])


def test_an_expanded_tensor_stores_its_elements_once():
    """expand(1000) costs one row and comes back expanded."""
    value = torch.arange(1000.0).reshape(1, 1000).expand(1000, 1000)
    parts = packed(value)
    back = codecs.decode("document/1", parts, {})
    assert sum(map(len, parts.values())) < 8192
    assert back.stride() == value.stride()
    assert torch.equal(back, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(10)[::3],
    ],
    ids=["transposed", "channels_last", "conj", "neg", "strided"],
)
def test_lazy_and_strided_tensors_come_back_equal_and_contiguous(value):
    """Strides are not kept, values are."""
    back = round_trip([value])[0]
    assert back.is_contiguous()
    assert torch.equal(back, value)


def test_tied_tensors_are_stored_once_and_come_back_tied():
    """One copy in the store, one object after the load."""
    weight = torch.randn(100, 100)
    parts = packed({"embed": weight, "head": weight.view(100, 100), "other": weight.clone()})
    back = codecs.decode("document/1", parts, {})
    assert len(parts["tensors.safetensors"]) < 2.1 * weight.nbytes
    assert back["embed"] is back["head"]
    assert back["embed"].data_ptr() != back["other"].data_ptr()


def test_two_dtypes_of_one_storage_are_both_exact():
    """[a, a.real] and x.view(int32) are stored apart."""
    a = torch.tensor([1 + 2j, 3 - 4j])
    x = torch.randn(4)
    back = round_trip([a, a.real, x, x.view(torch.int32)])
    assert all(torch.equal(one, other) for one, other in zip(back, [a, a.real, x, x.view(torch.int32)], strict=True))


def test_parameters_and_requires_grad_are_kept():
    """A parameter, frozen or not, comes back as one, and a tied plain tensor shares its memory."""
    free, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    value = {"free": free, "frozen": frozen, "leaf": torch.ones(1, requires_grad=True), "tied": free.detach()}
    back = round_trip(value)
    assert {key: (type(t), t.requires_grad) for key, t in back.items()} == {
        key: (type(t), t.requires_grad) for key, t in value.items()
    }
    assert back["free"].data_ptr() == back["tied"].data_ptr()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.eye(2).to_sparse_csr(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, requires_grad=True) * 2, "autograd"),
        (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_tensors_that_cannot_be_stored_are_refused_with_their_path(value, what):
    """Refused before anything is written, with what to do instead."""
    with pytest.raises(UnsupportedValueError, match=rf"^\$\.model\['a\.b'\] .*{what}"):
        codecs.encode({"model": {"a.b": value}})


def test_names_that_collide_are_told_apart():
    """The paths {'a': {'b': x}} and {'a.b': y} have one name; both tensors survive."""
    back = round_trip({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.full((1,), 2.0)})
    assert (back["a"]["b"].item(), back["a.b"].item(), back["__metadata__"].item()) == (0, 1, 2)


def test_the_buffers_are_the_memory_of_the_tensors():
    """A save copies no contiguous CPU tensor."""
    tensor = torch.zeros(1000)
    _, data = codecs.encode({"x": tensor}).parts["tensors.safetensors"]
    tensor[0] = 1.0
    assert np.frombuffer(data, np.float32)[0] == 1.0


def test_loaded_tensors_own_writable_memory():
    """A loaded value may be trained on."""
    back = round_trip({"x": torch.zeros(2), "y": np.zeros(2)})
    back["x"] += 1
    back["y"] += 1
    assert (back["x"].sum(), back["y"].sum()) == (2, 2)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_cut_off_pack_is_an_integrity_error(cut):
    """Never a shorter tensor, never a crash."""
    parts = packed({"x": torch.ones(10)})
    parts["tensors.safetensors"] = parts["tensors.safetensors"][:cut]
    with pytest.raises(IntegrityError):
        codecs.decode("document/1", parts, {})


def test_a_planted_pickle_is_not_executed(tmp_path):
    """What is not our format is refused, not run."""

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'owned'}",)

    parts = packed({"x": torch.ones(1)}) | {"tensors.safetensors": pickle.dumps(Attack())}
    with pytest.raises(IntegrityError):
        codecs.decode("document/1", parts, {})
    assert not (tmp_path / "owned").exists()


def test_a_dtype_name_cannot_reach_into_torch():
    """Stored text picks dtypes only."""
    parts = packed({"x": torch.ones(1)})
    document = json.loads(parts["document.json"])
    document["x"]["$tensor"]["dtype"] = "load"
    with pytest.raises(IntegrityError):
        codecs.decode("document/1", parts | {"document.json": json.dumps(document).encode()}, {})
