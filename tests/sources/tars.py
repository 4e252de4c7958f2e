"""Tar archives for the tests, written by the standard library."""

import io
import tarfile
from pathlib import Path

from tests import images


def tar_of(entries, tar_format=tarfile.PAX_FORMAT, **options):
    """An archive of (name or TarInfo, bytes)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, **options) as archive:
        for name, data in entries:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_tar(path, *entries, **options):
    """The same in a file; text is written as UTF-8."""
    pairs = [(name, data.encode() if isinstance(data, str) else data) for name, data in entries]
    Path(path).write_bytes(tar_of(pairs, **options))
    return Path(path)


def sample(key, label, *further):
    """Files of one sample with a small JPEG, which is another one for each key."""
    image = images.jpeg(images.photo(9 + len(key), 16, seed=sum(key.encode())), quality=50)
    return [(f"{key}.jpg", image), (f"{key}.cls", str(label)), *further]


def write_shards(folder, shards=3, per_shard=4):
    """``train-000.tar``, ...: keys and labels count through."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(shards):
        numbers = range(shard * per_shard, (shard + 1) * per_shard)
        entries = [entry for number in numbers for entry in sample(f"n{number % 2}/{number:05}", number * 7)]
        paths.append(write_tar(folder / f"train-{shard:03}.tar", *entries))
    return paths
