"""Pack a data set into few files, and check what is packed.

A pack is a folder: its files (tar shards, ``data.mdb`` or ``data.bin``), ``index.npz`` with what is known of the
records without reading them, ``checks.npz`` with their hashes and their places in the source, and ``manifest.json``,
which is written last.
"""

from gpupipe.packing.manifest import Manifest, PackedFile, Renamed, Skipped
from gpupipe.packing.options import PackOptions
from gpupipe.packing.run import pack
from gpupipe.packing.verify import verify_pack

__all__ = ["Manifest", "PackOptions", "PackedFile", "Renamed", "Skipped", "pack", "verify_pack"]
