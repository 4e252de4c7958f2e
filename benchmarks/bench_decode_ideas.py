"""What else could make the numba backend faster: each idea measured alone, so that nobody tries it again for nothing.

    python benchmarks/bench_decode_ideas.py ../shared/data/photos

Times are CPU time of one thread in microseconds an image, the median of interleaved rounds over the regions that one
epoch of `Recipe.train` needs, in nvImageCodec's decoder on the CPU, which is libjpeg-turbo.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import write_result
from nvidia import nvimgcodec
from PIL import Image
from torchvision.transforms.v2 import functional as F

import gpupipe as gp
from gpupipe.backends import numba_cpu
from gpupipe.backends.numba_cpu.decode import widened
from gpupipe.headers import scan
from gpupipe.plan import make_plan
from gpupipe.records import Record


def decoder() -> Any:
    return nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
    )


def cpu_us(functions: dict[str, Callable[[], object]], images: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            begin = time.thread_time()
            function()
            times[name].append((time.thread_time() - begin) / images * 1e6)
    return {name: round(median(each[1:]), 1) for name, each in times.items()}


def decoding(files: list[bytes], boxes: list[tuple[int, int, int, int]], rounds: int) -> dict[str, float]:
    """Regions to fresh memory and to reused memory; and whole images."""
    codec, held = decoder(), [None]
    parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def run(*, reuse: bool = False, whole: bool = False) -> Callable[[], None]:
        def decode_all() -> None:
            for data, (top, left, height, width) in zip(files, boxes, strict=True):
                stream = nvimgcodec.CodeStream(np.frombuffer(data, np.uint8))
                if not whole:
                    region = nvimgcodec.Region(top, left, top + height, left + width)
                    stream = stream.get_sub_code_stream(region=region)
                image = codec.decode(stream, params=parameters, image=held[0] if reuse else None)
                assert image is not None
                if reuse:
                    held[0] = image

        return decode_all

    functions = {
        "whole image": run(whole=True),
        "region, fresh memory": run(),
        "region, reused memory (what is used)": run(reuse=True),
    }
    return cpu_us(functions, len(files), rounds)


def without_conversion(files: list[bytes], rounds: int) -> dict[str, float]:
    """Whole images through Pillow's libjpeg-turbo, to RGB and left as YCbCr: the most that a fused conversion saves.

    nvImageCodec 0.9 leaves images as YCbCr only where they are 4:4:4, so there is nothing to fuse for most photos.
    """

    def run(mode: str) -> Callable[[], None]:
        def decode_all() -> None:
            for data in files:
                with Image.open(io.BytesIO(data)) as image:
                    image.draft(mode, image.size)
                    image.load()

        return decode_all

    return cpu_us({mode: run(mode) for mode in ("RGB", "YCbCr")}, len(files), rounds)


def scaled(files: list[bytes]) -> dict[str, Any]:
    """Decoding at half size (DCT scaling), where the eval recipe makes images smaller by more than that."""
    eval_side, worst, times = 112, [], {"whole": [], "half": []}
    for data in files:
        images = {}
        for name in times:
            begin = time.thread_time()
            image = Image.open(io.BytesIO(data))
            if name == "half":
                image.draft("RGB", (image.width // 2, image.height // 2))
            pixels = np.asarray(image.convert("RGB"))
            times[name].append(time.thread_time() - begin)
            planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float()
            images[name] = F.resize(planes, [eval_side, eval_side], antialias=True)
        worst.append(float((images["whole"] - images["half"]).abs().max()))
    return {
        "whole_us": round(median(times["whole"]) * 1e6, 1),
        "half_us": round(median(times["half"]) * 1e6, 1),
        "difference_max_lsb": {"median": round(median(worst), 1), "largest": round(max(worst), 1)},
    }


def outputs(files: list[bytes], rounds: int) -> dict[str, float]:
    """Rendering to each kind of output, decoding included."""
    functions: dict[str, Callable[[], object]] = {}
    records = [Record(data, 0, index, str(index)) for index, data in enumerate(files)]
    headers = [scan(data) for data in files]
    for dtype in ("float32", "bfloat16"):
        for layout in ("contiguous", "channels_last"):
            recipe = gp.Recipe.train(output=gp.Output(dtype=dtype, memory_format=layout))
            sizes = [(header.height, header.width) for header in headers]
            plan = make_plan(recipe, seed=0, epoch=0, indices=range(len(files)), sizes=sizes)
            batch = torch.empty(
                len(files),
                3,
                *recipe.output_size,
                dtype=getattr(torch, dtype),
                memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format,
            )
            numba_cpu._compile(recipe)
            workers = numba_cpu._Workers(recipe)

            def render_all(workers: Any = workers, plan: Any = plan, batch: torch.Tensor = batch) -> None:
                for row, (record, header) in enumerate(zip(records, headers, strict=True)):
                    workers.apply_row(record, header, plan, row, batch[row])

            functions[f"{dtype} {layout}"] = render_all
    return cpu_us(functions, len(files), rounds)


def memory(rounds: int) -> dict[str, float]:
    """Writing a batch of 64 once: to fresh memory, to fresh memory in huge pages, and to memory used before."""
    import mmap

    size, images = 64 * 3 * 224 * 224 * 4, 64
    used = np.empty(size, np.uint8)

    def fresh(*, huge: bool) -> Callable[[], None]:
        def write() -> None:
            with mmap.mmap(-1, size) as area:
                if huge:
                    area.madvise(mmap.MADV_HUGEPAGE)
                view = np.frombuffer(area, np.uint8)
                view[:] = 1
                del view

        return write

    return cpu_us(
        {
            "fresh": fresh(huge=False),
            "fresh, huge pages": fresh(huge=True),
            "used before (what is done)": lambda: used.fill(1),
        },
        images,
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    files = [path.read_bytes() for path in sorted(options.photos.glob("*/*"))]
    files = [data for data in files if scan(data).native]
    recipe = gp.Recipe.train()
    sizes = [(header.height, header.width) for header in map(scan, files)]
    plan = make_plan(recipe, seed=0, epoch=0, indices=range(len(files)), sizes=sizes)
    boxes = [widened(tuple(box), *size) for box, size in zip(plan.box.tolist(), sizes, strict=True)]
    write_result(
        "decode_ideas",
        {
            "photos": len(files),
            "decode_us": decoding(files, boxes, options.rounds),
            "colour_conversion_us": without_conversion(files, options.rounds),
            "dct_scaling": scaled(files),
            "output_us": outputs(files, options.rounds),
            "batch_memory_us": memory(options.rounds),
        },
    )


if __name__ == "__main__":
    main()
