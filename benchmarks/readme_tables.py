"""The README's tables of figures, from the files in benchmarks/results: nothing in them is copied by hand.

python benchmarks/readme_tables.py            # write them into README.md
python benchmarks/readme_tables.py --print    # show them
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results"

RECIPES = ("train", "train+jitter", "eval")
# What was set out to be reached: ratios to the yardstick, by recipe.
TARGETS = {
    "gpupipe numba float32": (2.5, 3.5, 2.6),
    "gpupipe numba uint8": (2.4, 3.4, 2.3),
    "gpupipe torchvision float32": (1.3, 0.95, 1.1),
}
# Rows of the table: name in the results, name in the README, what its pixels are. Without results, no row.
CPU_ROWS = (
    ("torchvision + Pillow, DataLoader", "torchvision + Pillow, DataLoader", "what people run"),
    ("torchvision v2 tensors, DataLoader", "torchvision v2 tensors, DataLoader", "within 1 level without jitter"),
    ("DALI's own operators", "DALI's own operators", "others"),
    ("SPDL, threads", "SPDL, threads, torchvision v2 tensors", "within 1 level without jitter"),
    ("webdataset, DataLoader", "webdataset, torchvision + Pillow, DataLoader", "what people run"),
    ("FFCV, JPEG", "FFCV, encoded again at quality 90", "others, without hue"),
    ("gpupipe numba float32", "**gpupipe, numba, float32**", "0.0004 LSB from the reference"),
    ("gpupipe numba uint8", "gpupipe, numba, uint8 precision", "torchvision's on uint8, bit for bit"),
    ("gpupipe torchvision float32", "gpupipe, torchvision", "the reference"),
    ("gpupipe dali float32", "gpupipe, DALI on the CPU (for tests)", "0.01 LSB from the reference"),
)


def result(name: str) -> dict[str, Any]:
    """What a benchmark measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())["measured"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def cpu() -> str:
    """Ratios to the yardstick; targets in brackets."""
    measured = result("cpu")["recipes"]
    speeds = " / ".join(f"{measured[recipe][CPU_ROWS[0][0]]['images_per_s']:.0f}" for recipe in RECIPES)
    rows = []
    for name, shown, pixels in CPU_ROWS:
        if not any(name in measured[recipe] for recipe in RECIPES):
            continue
        ratios = []
        for place, recipe in enumerate(RECIPES):
            found = measured[recipe].get(name)
            target = f" ({TARGETS[name][place]})" if name in TARGETS else ""
            ratios.append("missing" if found is None else f"{found['ratio']:.2f}{target}")
        if not rows:
            shown += f" ({speeds} images/s)"
        rows.append([shown, *ratios, pixels])
    return table(["", "train (target)", "train + ColorJitter", "eval", "pixels"], rows)


def scale() -> str:
    """Everything that is not images a second."""
    sampler, scan, plan = result("sampler"), result("folder_scan"), result("plan")["plans_per_s"]
    cost = result("cost")["log-normal, sigma 0.8"]["orders"]
    one, above = sampler["times"]["world_size 1"], sampler["peak_above_array_bytes"]
    weighted, left = sampler["weighted"], scan["left_bytes_per_file"]
    spread = cost["window 32"]["spread"]  # the default
    rows = [
        [
            "begin an epoch of 10,000,000 shuffled samples (`bench_sampler.py`)",
            f"{one['gpupipe']['median_s']:.2f} s, {max(0, above['gpupipe']) / 1e6:.0f} MB above the array",
            f"DistributedSampler {one['torch']['median_s']:.2f} s, {above['torch'] / 1e6:.0f} MB",
        ],
        [
            "the same, weighted (`bench_sampler.py`; we lose)",
            f"{weighted['gpupipe']['median_s']:.1f} s",
            f"WeightedRandomSampler {weighted['torch']['median_s']:.1f} s",
        ],
        [
            "list 100,000 files in 1,000 folders (`bench_folder_scan.py`)",
            f"{scan['times']['gpupipe']['median_s'] * 1e3:.0f} ms, {left['gpupipe']:.0f} bytes a file kept",
            f"ImageFolder {scan['times']['torchvision']['median_s'] * 1e3:.0f} ms, {left['torchvision']:.0f} bytes",
        ],
        [
            "plans a second, one core, batch 256, with jitter (`bench_plan.py`)",
            f"{plan['train with jitter, batch 256']:,}",
            f"torchvision's draws {plan['torchvision make_params, train with jitter']:,}",
        ],
        [
            "spread of the bytes of batches, log-normal sizes (`bench_cost.py`)",
            f"`CostAware` {spread:.3f}",
            f"plain shuffle {cost['plain']['spread']:.3f}",
        ],
    ]
    return table(["", "gpupipe", "peer"], rows)


def stages() -> str:
    """Where the numba backend's microseconds go."""
    measured = result("cpu_stages")["stages_us"]
    names = ("read", "header", "plan", "scan for markers", "decode", "render")
    rows = [
        [f"{recipe}, {precision}", *(f"{measured[f'{recipe} {precision}'][name]:.0f}" for name in names)]
        for precision in ("float32", "uint8")
        for recipe in RECIPES
    ]
    head = ["us of CPU an image", "read", "header", "plan", "marker check", "decode", "resize, jitter, store"]
    return table(head, rows)


def sources() -> str:
    """Images a second from each kind of source, warm and cold, as ratios; and system calls."""
    measured = result("sources")
    calls = measured["per_image"]
    yardstick = (
        next(iter(measured["warm"].values()))["images_per_s"],
        next(iter(measured["cold"].values()))["images_per_s"],
    )
    rows = []
    for number, (name, warm) in enumerate(measured["warm"].items()):
        cold = measured["cold"][name]
        shown = name if number else f"{name} ({yardstick[0]:,.0f} / {yardstick[1]:,.0f} images/s)"
        counted = (
            (f"{abs(calls[name]['opens']):.2f}", f"{calls[name]['calls']:.1f}")
            if isinstance(calls, dict)
            else ("-", "-")
        )
        rows.append([shown, f"{warm['ratio']:.2f}", f"{cold['ratio']:.2f}", *counted])
    return table(["", "warm", "cold", "opens an image", "system calls an image"], rows)


def opening() -> str:
    """A source of ImageNet's size, opened from its index."""
    measured = result("open")
    names = {"folder": "folder of class folders", "tar": "147 tar shards", "lmdb": "LMDB"}
    rows = [
        [shown, f"{measured[name]['seconds']:.2f} s", f"{measured[name]['memory_mb']:.0f} MB"]
        for name, shown in names.items()
    ]
    return table(["1,281,167 records, opened from the index", "time", "memory"], rows)


def operators() -> str:
    """Each operator: how far the backends are from torchvision's own, and what it costs."""
    measured = result("operators")
    gpu = measured["dali_gpu"]
    rows = []
    for name, found in measured["operators"].items():
        single, whole = found["float32"], found["uint8"]
        dali, numba = (single["differences"][backend] for backend in ("dali", "numba"))
        exact = [_levels(whole["differences"][backend]) for backend in ("dali", "numba")]
        costs = [f"{max(0, single['us'][way]):,.0f}" for way in ("torchvision", "batch", "numba")]
        rows.append([f"`{name}`", _apart(dali), exact[0], gpu, _apart(numba), exact[1], *costs])
    head = (
        "operator of torchvision v2",
        "DALI cpu: max, p99.9",
        "in uint8",
        "DALI gpu",
        "numba: max, p99.9",
        "in uint8",
        "torchvision, us",
        "batch, us",
        "numba, us",
    )
    return table(head, rows)


def _apart(found: dict[str, float]) -> str:
    return ", ".join("0" if found[key] == 0 else f"{found[key]:.1g}" for key in ("max_lsb", "p999_lsb"))


def _levels(found: dict[str, float]) -> str:
    if not found["off_share"]:
        return "equal"
    return f"{found['max_lsb']:.0f} ({100 * found['off_share']:.4f} %)"


def dali_operators() -> str:
    """Why operations are not DALI's own."""
    rows = [
        [f"`{name}`", f"{found['max_lsb']:.0f}", f"{found['off_share']:.2%}", f"{found['us']:,.0f}"]
        for name, found in result("operators")["dali_operators"].items()
    ]
    return table(["DALI's own operator, uint8", "max, levels", "more than 1 level off", "us on one core"], rows)


def threads() -> str:
    found = result("cpu_stages")["threads_images_per_s"]
    return "; ".join(f"{count}: {speed:,.0f}" for count, speed in found.items())


def accuracy() -> str:
    """Whether accuracy moves with the loader."""
    measured = result("accuracy")
    rows = []
    for name, found in measured["loaders"].items():
        row = [name, f"{found['mean']:.2f} %", f"{found['sd']:.2f}"]
        if "difference" in found:
            difference = found["difference"]
            low, high = difference["ci95"]
            row += [f"{difference['mean']:+.2f} ({low:+.2f} to {high:+.2f})", f"{difference['p']:.2f}"]
        else:
            row += ["", ""]
        rows.append(row)
    return table([f"{measured['seeds']} seeds", "accuracy", "sd", "difference (95 % interval)", "p"], rows)


def remote() -> str:
    """Epochs over a slow store, and through the cache."""
    measured = result("cache")
    epochs, waits = measured["epochs"], measured["waits"]
    rows = []
    for way in ("fsspec in a DataLoader", "webdataset", "webdataset with its cache", *_OURS):
        found = {form: epochs.get(f"{way}, {form}") for form in ("folder", "tar")}
        speeds = ["-" if each is None else f"{each['images_per_s']:,.0f}" for each in found.values()]
        waited = [waits.get(f"{way}, {form}") for form in found]
        shares = ["-" if each is None else f"{100 * each['share_over_100_ms']:.0f} %" for each in waited]
        rows.append([f"gpupipe, {way}" if way in _OURS else way, *speeds, *shares])
    head = ("", "images/s, one object each", "in tar shards", "steps that waited over 0.1 s", "in tar shards")
    longest_ms = 1e3 * measured["headline"]["longest_wait_after_warm_up_s, first epoch, tar"]
    warm_up = f"After the warm-up of {measured['warm_up_steps']} steps"
    return f"{table(head, rows)}\n\n{warm_up}, the longest wait of the first epoch over shards was {longest_ms:.0f} ms."


_OURS = ("direct", "first epoch", "staged first", "later epochs", "local copy")


def slow_loader() -> str:
    """What came of doing what diagnose says."""
    rounds = result("slow_loader")["rounds"]
    rows = [
        [
            each["setting"],
            f"{each['images_per_s']:.0f}",
            f"{each['images_per_s'] / rounds[0]['images_per_s']:.1f}",
            f"{100 * each['waited']:.0f} %",
            f"`{each['finding']}`" if each["finding"] else "nothing to change",
        ]
        for each in rounds
    ]
    return table(["how it loads", "images/s", "gain", "waits", "diagnose says first"], rows)


def diagnosis() -> str:
    """How often planted conditions are found, and healthy runs blamed."""
    measured = result("diagnose")
    conditions = {name: each for name, each in measured["conditions"].items() if name != "healthy"}
    missed = ", ".join(
        f"`{name}` {each['named_first']} of {each['runs']}"
        for name, each in conditions.items()
        if each["named_first"] < each["runs"]
    )
    runs = sum(each["runs"] for each in conditions.values())
    first = sum(each["named_first"] for each in conditions.values())
    healthy = measured["conditions"]["healthy"]
    not_always = f" (not always: {missed})" if missed else ""
    blamed = healthy["runs"] - healthy["named_first"]
    return (
        f"{len(conditions)} conditions planted in {runs} real runs: named first in {first} "
        f"({100 * measured['named_first_share']:.0f} %), found in {100 * measured['found_share']:.0f} %{not_always}; "
        f"false alarms in {blamed} of {healthy['runs']} healthy runs."
    )


def watching() -> str:
    found = result("watch")
    low, high = (100 * share for share in found["share_95"])
    # Microseconds of a step's milliseconds, and milliseconds of each second.
    summed = 0.1 * found["us_a_step"] / found["step_ms"] + 0.1 * found["ms_a_look"]
    return (
        f"`watch` takes {found['us_a_step']:.0f} us a step, and {found['ms_a_look']:.1f} ms a second for its looks: "
        f"{summed:.1f} % of steps of {found['step_ms']:.0f} ms. Taken as a whole, watched against not, such steps took "
        f"{100 * found['share']:.1f} % more CPU time (95 %: {low:.1f} to {high:.1f} %), which is how well this machine "
        "can tell."
    )


TABLES: dict[str, Callable[[], str]] = {
    "cpu": cpu,
    "scale": scale,
    "stages": stages,
    "threads": threads,
    "sources": sources,
    "opening": opening,
    "operators": operators,
    "dali_operators": dali_operators,
    "accuracy": accuracy,
    "remote": remote,
    "slow_loader": slow_loader,
    "diagnosis": diagnosis,
    "watching": watching,
}


def filled(text: str) -> str:
    """The README with all tables as the results have them.

    Raises:
        KeyError: It asks for a table that is not there.
    """

    def replace(found: re.Match[str]) -> str:
        return f"<!-- {found[1]}: by benchmarks/readme_tables.py -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+): by .*? -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="show the tables and write nothing")
    if parser.parse_args().print:
        for name, make in TABLES.items():
            try:
                print(f"{name}:\n{make()}\n")
            except FileNotFoundError as error:
                print(f"{name}: not measured yet, there is no {error.filename}\n")
        return
    readme = REPO / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    main()
