"""Everything that has to be measured on a GPU, in one command.

    python benchmarks/gpu/run.py ../shared/data/photos                  # on a GPU, about 15 minutes
    python benchmarks/gpu/run.py --only probe throughput
    python benchmarks/gpu/run.py --device cpu                           # does the code run? Nothing is kept

Parts: "probe" (open questions), "throughput" (the exact pipeline against DALI's own, decoding alone and a DataLoader),
"step" (a ResNet-50 step against synthetic data), "levers" (a sweep that prints the best setting). Each runs in a
process of its own, so that one that crashes does not take the others along, and is kept as results/gpu_PART.json.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.common import needs_gpu, parser, setup
from harness import write_result

PARTS = ("probe", "throughput", "step", "levers")


def run(part: str) -> int:
    """One part, in a process of its own; its exit status."""
    print(f"== {part}", flush=True)
    others = [argument for argument in sys.argv[1:] if argument not in PARTS and argument != "--only"]
    return subprocess.run([sys.executable, __file__, *others, "--part", part], check=False).returncode


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--part", choices=PARTS, help="in this process, and nothing else")
    made.add_argument("--discard", action="store_true", help="keep no figures")
    options = made.parse_args()
    needs_gpu(options.device)
    if options.part is None:
        failed = [part for part in options.only if run(part)]
        if failed:
            raise SystemExit(f"these did not end well: {', '.join(failed)}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        measured = importlib.import_module(f"gpu.{options.part}").measure(setup(options, Path(scratch)))
    if options.device == "cpu":
        json.dumps(measured, allow_nan=False)
        print(f"{options.part}: it runs; figures of a CPU mean nothing and are not kept", flush=True)
    elif options.discard:
        print(json.dumps(measured, indent=2, allow_nan=False), flush=True)
    else:
        write_result(f"gpu_{options.part}", measured)


if __name__ == "__main__":
    main()
