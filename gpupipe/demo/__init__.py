"""A first look at gpupipe on pictures that are already on the machine: `gpupipe demo`.

pictures.py   a labelled data set from what installed packages ship
speed.py      images per second
sheet.py      contact sheets of what a model would see
run.py        the demo itself
"""

from __future__ import annotations

from gpupipe.demo.run import Demo, demo

__all__ = ["Demo", "demo"]
