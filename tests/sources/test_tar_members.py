"""The headers of tar archives, against the standard library's tarfile and GNU tar."""

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import SourceError
from gpupipe.sources.tar_members import Member, header_of, list_members
from tests.sources.tars import tar_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def listed(data):
    return list_members(memoryview(data), "some.tar")


def by_tarfile(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [Member(m.name, m.offset_data, m.size) for m in archive if m.isreg()]


def info(name, kind, **values):
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in values.items():
        setattr(made, key, value)
    return made


NAMES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=30).map(
    lambda text: text.strip("/") or "x"
)
LONG_NAMES = st.tuples(NAMES, st.integers(1, 40)).map(lambda both: "/".join([both[0]] * both[1]))


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS.keys())
def test_list_members_of_ordinary_archives_equals_tarfile(tar_format):
    data = tar_of([("a.jpg", b"1" * 700), ("b/c.txt", b""), ("b/d.cls", b"3" * 512), ("ü/日.png", b"4")], tar_format)
    found = listed(data)
    assert found.members == by_tarfile(data)
    assert len(found.members) == 4
    assert (found.special, found.cut, found.junk_at) == ([], None, None)
    for member in found.members[:3] if tar_format == tarfile.PAX_FORMAT else found.members:
        assert header_of(data[member.offset - 512 : member.offset]) == (member.name, member.size)


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@given(entries=st.lists(st.tuples(NAMES | LONG_NAMES, st.binary(max_size=1200)), max_size=8))
def test_list_members_of_any_names_equals_tarfile(entries, tar_format):
    data = tar_of(entries, tar_format)
    found = listed(data)
    assert found.members == by_tarfile(data)
    assert [data[m.offset : m.offset + m.size] for m in found.members] == [bytes_ for _, bytes_ in entries]
    assert found.cut is None


@given(data=st.binary(min_size=3000, max_size=3000), flips=st.lists(st.integers(0, 4 * 1024 - 1), max_size=3))
def test_list_members_of_damaged_archives_never_fails_otherwise(data, flips):
    whole = bytearray(tar_of([("a/" * 60 + "b.jpg", data[:100]), ("c.jpg", data[100:700]), ("d.cls", b"1")]))
    for place in flips:
        whole[place] ^= data[place % len(data)] or 1
    with suppress(SourceError):
        found = listed(bytes(whole))
        assert all(0 <= m.offset <= m.offset + m.size <= len(whole) for m in found.members)


def test_list_members_with_float_times_in_pax_headers_equals_tarfile():
    entry = tarfile.TarInfo("a.jpg")
    entry.mtime = 1234.5
    entry.pax_headers = {"comment": "x=y\n12 path=no.jpg\n"}
    data = tar_of([(entry, b"123"), ("b.jpg", b"4")])
    assert data[156] == ord("x")
    assert listed(data).members == by_tarfile(data)
    assert [m.name for m in listed(data).members] == ["a.jpg", "b.jpg"]


def test_list_members_with_size_in_pax_header_equals_tarfile():
    entry = tarfile.TarInfo("a.jpg")
    entry.pax_headers = {"size": "700"}
    data = bytearray(tar_of([(entry, b"1" * 700), ("b.jpg", b"4")]))
    header = bytearray(data[1024:1536])
    header[124:136] = b"0" * 11 + b"\0"  # as for files too large for the field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[1024:1536] = header
    assert listed(bytes(data)).members == by_tarfile(bytes(data)) == [("a.jpg", 1536, 700), ("b.jpg", 3072, 1)]


def test_list_members_with_global_pax_header_equals_tarfile():
    data = tar_of([("a.jpg", b"1"), ("b.jpg", b"22")], pax_headers={"comment": "made by a test"})
    assert data[156] == ord("g")
    assert listed(data).members == by_tarfile(data)


def test_list_members_with_base_256_size_equals_tarfile():
    data = bytearray(tar_of([("a.jpg", b"1" * 700), ("b.jpg", b"2")]))
    data[124:136] = b"\x80" + (700).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert listed(bytes(data)).members == by_tarfile(bytes(data))
    assert listed(bytes(data)).members[0].size == 700


def test_list_members_with_checksum_of_signed_bytes_equals_tarfile():
    data = bytearray(tar_of([("ü.jpg", b"1"), ("b.jpg", b"2")], tarfile.GNU_FORMAT))
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(byte - 256 if byte > 127 else byte for byte in data[:512])
    assert listed(bytes(data)).members == by_tarfile(bytes(data))
    assert len(listed(bytes(data)).members) == 2


def test_list_members_of_v7_archive_equals_tarfile():
    data = bytearray(tar_of([("folder/", b""), ("folder/a.jpg", b"1")], tarfile.USTAR_FORMAT))
    for start in (0, 512):  # no magic, no type
        data[start + 156] = 0
        data[start + 257 : start + 512] = bytes(255)
        data[start + 148 : start + 156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    assert listed(bytes(data)).members == by_tarfile(bytes(data)) == [("folder/a.jpg", 1024, 1)]


def test_list_members_passes_over_directories_and_counts_what_is_no_file():
    data = tar_of(
        [
            (info("folder", tarfile.DIRTYPE), b""),
            ("folder/a.jpg", b"1"),
            (info("folder/b.jpg", tarfile.SYMTYPE, linkname="a.jpg"), b""),
            (info("folder/c.jpg", tarfile.LNKTYPE, linkname="folder/a.jpg" + "x" * 200), b""),
            (info("null", tarfile.CHRTYPE), b""),
            (info("pipe", tarfile.FIFOTYPE), b""),
            ("folder/d.jpg", b"2"),
        ],
        tarfile.GNU_FORMAT,
    )
    found = listed(data)
    assert [m.name for m in found.members] == ["folder/a.jpg", "folder/d.jpg"]
    assert found.members == by_tarfile(data)
    assert found.special == ["folder/b.jpg", "folder/c.jpg", "null", "pipe"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the program tar")
@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_list_members_of_the_tar_program_equals_tarfile(tmp_path, tar_format):
    deep = tmp_path / "files" / ("long" * 10) / ("name" * 5)
    deep.mkdir(parents=True)
    names = ["a.jpg", "a b.cls", "ü.png"] + (["n" * 120 + ".jpg"] if tar_format not in ("v7", "ustar") else [])
    for name in names:
        (deep / name).write_bytes(name.encode())
    os.link(deep / "a.jpg", deep / "z link.jpg")
    subprocess.run(["tar", f"--format={tar_format}", "-cf", "x.tar", "files"], cwd=tmp_path, check=True)
    data = (tmp_path / "x.tar").read_bytes()
    found = listed(data)
    assert found.members == by_tarfile(data)
    assert len(found.members) == len(names)
    assert len(found.special) == 1


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the program tar")
@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_list_members_with_sparse_file_raises(tmp_path, tar_format):
    with open(tmp_path / "a.jpg", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    made = subprocess.run(["tar", f"--format={tar_format}", "--sparse", "-cf", "x.tar", "a.jpg"], cwd=tmp_path)
    data = (tmp_path / "x.tar").read_bytes()
    if made.returncode or len(data) > 1 << 20:
        pytest.skip("this file system keeps no holes")
    with pytest.raises(SourceError, match="sparse"):
        listed(data)


def test_list_members_of_archive_cut_inside_a_member_says_where():
    data = tar_of([("a.jpg", b"1" * 700), ("b.jpg", b"2" * 700)])
    for length in (2048, 2049, 2500, 2747):
        found = listed(data[:length])
        assert [m.name for m in found.members] == ["a.jpg"]
        assert "'b.jpg' of 700 bytes" in found.cut
        assert found.cut_at == 1536
    found = listed(data[:1537])
    assert "end marker" in found.cut
    assert found.cut_at == 1536


@pytest.mark.parametrize("length", [2748, 3072, 3100])
def test_list_members_of_archive_cut_behind_a_member_is_cut(length):
    found = listed(tar_of([("a.jpg", b"1" * 700), ("b.jpg", b"2" * 700)])[:length])
    assert [m.name for m in found.members] == ["a.jpg", "b.jpg"]
    assert "end marker" in found.cut


def test_list_members_with_one_block_of_zeros_at_the_end_is_whole():
    data = tar_of([("a.jpg", b"1" * 700)])
    assert listed(data[: 1536 + 512]).cut is None


def test_list_members_with_damaged_header_says_where():
    data = bytearray(tar_of([("a.jpg", b"1" * 700), ("b.jpg", b"2" * 700), ("c.jpg", b"3")]))
    data[1536 + 5] ^= 1
    found = listed(bytes(data))
    assert [m.name for m in found.members] == ["a.jpg"]
    assert found.cut_at == 1536
    assert len(by_tarfile(bytes(data))) == 1  # tarfile says nothing


def test_list_members_of_two_archives_in_a_row_raises():
    first, second = tar_of([("a.jpg", b"1")]), tar_of([("b.jpg", b"2")])
    with pytest.raises(SourceError, match=f"another archive behind its end, at byte {len(first)}.*concatenate"):
        listed(first + second)


@pytest.mark.parametrize("kind", [b"L", b"x", b"g"])
def test_list_members_with_huge_header_raises(kind):
    with pytest.raises(SourceError, match="a header of 2000000 bytes at byte 1024"):
        listed(tar_of([("a.jpg", b"1"), (info("long", kind), b"x" * 2_000_000)]))


@pytest.mark.parametrize("size", [b"7x", b"9" * 5000])  # Python reads no integers of more than 4300 digits
def test_list_members_with_odd_size_in_pax_header_raises(size):
    body = b" size=" + size + b"\n"
    body = str(len(body) + len(str(len(body) + 1))).encode() + body
    with pytest.raises(SourceError, match=r"has a size of b'.* in the PAX header at byte 0"):
        listed(tar_of([(info("head", b"x"), body), ("a.jpg", b"1")]))


def test_list_members_notes_other_bytes_behind_the_end():
    data = tar_of([("a.jpg", b"1")])
    found = listed(data + b"\0\0something")
    assert found.junk_at == len(data) + 2
    assert found.cut is None


@pytest.mark.parametrize(("data", "words"), [(b"", "empty"), (b"a", "no tar"), (b"\xff\xd8\xff" * 999, "no tar")])
def test_list_members_of_no_archive_raises(data, words):
    with pytest.raises(SourceError, match=words):
        listed(data)


def test_list_members_of_compressed_archive_says_to_decompress():
    with pytest.raises(SourceError, match=r"gzip.*decompress"):
        listed(gzip.compress(tar_of([("a.jpg", b"1")])))


def test_list_members_of_absolute_and_parent_names_are_only_names():
    names = ["/etc/passwd.jpg", "../../a.jpg", "./b.jpg"]
    assert [m.name for m in listed(tar_of([(name, b"") for name in names])).members] == names
