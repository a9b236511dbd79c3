"""Reading safetensors by hand: what the library reads, and AdapterError for anything else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from manylora.engine.errors import AdapterError
from manylora.engine.safetensors_file import SafetensorsFile

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
many = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return path


def entry(
    dtype: object = "F32", shape: object = (1, 2), offsets: object = (0, 8)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def reason(path: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        SafetensorsFile.read(path)
    return str(caught.value)


def tensors(path: Path) -> dict[str, Tensor]:
    file = SafetensorsFile.read(path)
    return {
        e.name: torch.frombuffer(bytearray(file.data(e)), dtype=DTYPES[e.dtype]).view(e.shape)
        for e in file.entries
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[name].dtype and torch.equal(a, other[name]) for name, a in one.items()
    )


@many
@given(data=st.data())
def test_a_good_file_reads_as_the_library_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    size = st.integers(1, 5)
    shapes = st.tuples(size, size, st.sampled_from(list(DTYPES.values())))
    wanted = {
        name: torch.randn(rows, columns).to(dtype)
        for name, (rows, columns, dtype) in data.draw(
            st.dictionaries(st.text(min_size=1, max_size=6), shapes, max_size=4)
        ).items()
        if name != "__metadata__"
    }
    save_file(wanted, tmp_path / "good", metadata={"format": "pt"})

    assert same(tensors(tmp_path / "good"), wanted)
    assert same(load_file(tmp_path / "good"), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_nan_and_infinity_are_found(tmp_path: Path, dtype: str, value: float | None) -> None:
    tensor = torch.full((3, 5), torch.finfo(DTYPES[dtype]).max).to(DTYPES[dtype])
    if value is not None:
        tensor[2, 4] = value
    save_file({"x": tensor}, tmp_path / "file")

    file = SafetensorsFile.read(tmp_path / "file")

    assert file.is_finite(file.entries[0]) == (value is None)


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2, 1], [0, 8]),
    "b": entry("BF16", [1, 2], [8, 12]),
}


@many
@given(data=st.data())
def test_a_mutated_file_is_refused_or_reads_as_the_library_reads_it(
    tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(write(tmp_path / "file", GOOD, bytes(12)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        at = data.draw(st.integers(0, len(content) - 1), "at")
        match data.draw(st.sampled_from(["set", "cut", "insert"]), "change"):
            case "set":
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 20))]
            case "insert":
                content[at:at] = data.draw(
                    st.binary(max_size=4) | st.sampled_from([b"[", b"9" * 30])
                )
        content = content or bytearray(b"\0")
    assert_refused_or_agreed(tmp_path / "file", bytes(content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I64"]) | json_values,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 12, -4, 1 << 70])) | json_values,
    },
)


@many
@given(header=st.dictionaries(st.sampled_from("abc"), entries | json_values) | json_values)
def test_a_header_of_any_json_is_refused_or_reads_as_the_library_reads_it(
    tmp_path: Path, header: object
) -> None:
    content = json.dumps(header).encode()
    assert_refused_or_agreed(
        tmp_path / "file", len(content).to_bytes(8, "little") + content + bytes(12)
    )


def assert_refused_or_agreed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        ours = tensors(path)
    except AdapterError as error:
        str(error).encode()  # can be sent and shown
        return
    try:
        assert same(ours, load_file(path))
    except SafetensorError as error:
        # The library is stricter in what says nothing about tensors: padding and metadata.
        assert "header" in str(error)  # noqa: PT017


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20, 60])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "weights", GOOD, bytes(12))
    path.write_bytes(path.read_bytes()[:length])

    assert "weights" in reason(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"x": entry(dtype="F64", offsets=(0, 16))}, "'x': dtype 'F64'"),
        ({"x": entry(dtype="I64", offsets=(0, 16))}, "'x': dtype 'I64'"),
        ({"x": entry(dtype=[])}, "'x': dtype []"),
        ({"x": entry(shape=[2])}, "'x': shape [2] is not that of a matrix"),
        ({"x": entry(shape=[1, 1, 2])}, "'x': shape"),
        ({"x": entry(shape=[0, 2], offsets=(0, 0))}, "'x': shape"),
        ({"x": entry(shape=[True, 2])}, "'x': shape and data_offsets must be whole numbers"),
        ({"x": entry(shape=[-1, -2])}, "'x': shape and data_offsets must be whole numbers"),
        ({"x": entry(shape=[1 << 62, 1 << 62])}, "'x': data_offsets do not fit"),
        ({"x": entry(offsets=(8, 0))}, "'x': data_offsets do not fit"),
        ({"x": entry(offsets=(8, 16))}, "a hole or an overlap before 'x'"),
        ({"x": entry(), "y": entry()}, "a hole or an overlap before 'y'"),
        ({"x": entry(shape=[1, 1], offsets=(0, 4))}, "the tensors end at byte 4 of 8"),
        ({"x": {}}, "'x': dtype, shape or data_offsets is missing"),
        ([], "not a JSON object"),
        (b'{"x": 1, "x": 2}', "duplicate"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ({f"{i}": entry() for i in range(5000)}, "5000 tensors"),
        ({"\ud800": entry()}, "not JSON"),
        ({"x": entry(dtype="\ud800")}, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_names_the_tensor_or_what_is_wrong(
    tmp_path: Path, header: object, said: str
) -> None:
    assert said in reason(write(tmp_path / "weights", header, bytes(8)))


def test_a_header_beyond_one_mebibyte_is_refused(tmp_path: Path) -> None:
    assert "1 MiB" in reason(write(tmp_path / "weights", b" " * ((1 << 20) + 1)))


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    assert "nothing is missing" in reason(tmp_path / "nothing")
    assert tmp_path.name in reason(tmp_path)


def test_the_library_and_we_agree_that_the_good_header_is_good(tmp_path: Path) -> None:
    """Else the mutations above would start from a file that was never read."""
    path = write(tmp_path / "file", GOOD, bytes(12))

    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors(path)) == {"a", "b"}


@pytest.mark.parametrize("metadata", [{"x": 1}, {"x": None}, [], "text", 1], ids=repr)
def test_metadata_of_another_kind_than_the_formats_is_refused(
    tmp_path: Path, metadata: object
) -> None:
    header = {"__metadata__": metadata, "a": entry()}

    assert "__metadata__" in reason(write(tmp_path / "a.safetensors", header, bytes(8)))
