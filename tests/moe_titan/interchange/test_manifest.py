"""Sums of files, and what they find."""

import io
import zlib

import pytest

from moe_titan.interchange import InterchangeError
from moe_titan.interchange.manifest import FileSum, Manifest, SummedFile, checksum, damage, read_manifest

DATA = bytes(range(256)) * 7 + b"the end"


@pytest.mark.parametrize("small", [0, 50, 1 << 20])
def test_sums_are_of_what_was_written(tmp_path, monkeypatch, small) -> None:
    monkeypatch.setattr("moe_titan.interchange.manifest._SMALL", small)
    with (tmp_path / "file").open("wb") as stream:
        file = SummedFile(stream, checksums=True)
        for part in (DATA[:100], memoryview(DATA)[100:101], bytearray(DATA[101:])):
            file.write(part)
        assert file.tell() == len(DATA)
    assert file.sum == FileSum(len(DATA), zlib.crc32(DATA)) == checksum(tmp_path / "file")
    unsummed = SummedFile(io.BytesIO(), checksums=False)
    unsummed.write(DATA)
    assert unsummed.sum == FileSum(len(DATA), None)


def test_sums_of_a_file_longer_than_a_block(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moe_titan.interchange.manifest._SMALL", 50)
    monkeypatch.setattr("moe_titan.interchange.manifest._BLOCK", 100)
    (tmp_path / "file").write_bytes(DATA)
    assert checksum(tmp_path / "file") == FileSum(len(DATA), zlib.crc32(DATA))


@pytest.mark.parametrize(
    ("content", "checksums", "found"),
    [
        (DATA, True, None),
        (DATA[:-1], False, f"is cut off: {len(DATA) - 1} of {len(DATA)} bytes"),
        (DATA[:50] + b"\xff" + DATA[51:], True, "is damaged: its CRC-32 is "),
        (DATA[:50] + b"\xff" + DATA[51:], False, None),
        (DATA + b"\0", True, "is damaged"),
        (None, False, "is missing"),
    ],
)
def test_damage(tmp_path, content, checksums, found) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    problems = damage(tmp_path, [("file", FileSum(len(DATA), zlib.crc32(DATA)))], checksums)
    assert problems == [] if found is None else len(problems) == 1 and f"{tmp_path}/file {found}" in problems[0]


def test_a_manifest_comes_back(tmp_path) -> None:
    assert read_manifest(tmp_path) is None
    manifest = Manifest({"tp": 2, "ep": 4}, {"a": FileSum(3, 4), "b": FileSum(5, None)})
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"[]", b'{"layout": {}}', b'{"layout": {}, "files": {"a": 3}}'])
def test_a_damaged_manifest_is_named(tmp_path, content) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InterchangeError, match="manifest.json: cannot be read"):
        read_manifest(tmp_path)
