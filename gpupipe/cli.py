"""The `gpupipe` command. Each subcommand is one function below and its `@_command`; heavy imports stand inside it.

Exit status: 0 done; 1 the command's answer is no (a tolerance is broken); 2 wrong use, or something that cannot be
read or run, with one line on stderr; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupipe import __version__
from gpupipe.errors import ConfigError, GpupipeError, SourceError

if TYPE_CHECKING:
    from gpupipe.recipe import Recipe

OK, NO, ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

Run = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: what `--help` says of it, what it takes, and the function that does it."""

    help: str
    arguments: tuple[Argument, ...]
    run: Run


_COMMANDS: dict[str, _Command] = {}


def _argument(*flags: str, **keywords: Any) -> Argument:
    """The arguments of `ArgumentParser.add_argument`."""
    return flags, keywords


def _command(name: str, summary: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Register the function below as a subcommand; its docstring is the long help."""

    def register(run: Run) -> Run:
        _COMMANDS[name] = _Command(summary, arguments, run)
        return run

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; None: those of this process.

    Returns:
        The exit status, as the module says.
    """
    try:
        arguments = _parser().parse_args(argv)
        status = int(arguments.run(arguments))
    except GpupipeError as error:
        print(f"gpupipe: {' '.join(str(error).split())}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("gpupipe: interrupted", file=sys.stderr)
        return INTERRUPTED
    except FileNotFoundError:
        if _is_somewhere():
            raise
        print("gpupipe: the folder that this was started in is gone: change to another one", file=sys.stderr)
        return ERROR
    except BrokenPipeError:
        _drop_output()  # `gpupipe ... | head` has seen enough
        return BROKEN_PIPE
    return status


def _show(text: str) -> None:
    """Print a result, all of it and now: what cannot be written is an error of this command."""
    out = sys.stdout
    if out is None:  # closed, as by `>&-`
        return
    encoding = out.encoding or "ascii"
    try:
        # Names of files may have characters that this terminal has not.
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise SourceError(f"the output cannot be written: {error.strerror or error}", uri="stdout") from error


def _drop_output() -> None:
    """The interpreter flushes stdout once more at its end: into nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_somewhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpupipe",
        description="torchvision's training pixels, faster, on the GPU or the CPU.",
        epilog="`gpupipe COMMAND --help` says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"gpupipe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=inspect.cleandoc(command.run.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for flags, keywords in command.arguments:
            added.add_argument(*flags, **keywords)
        added.set_defaults(run=command.run)
    return parser


# Recipes by name, shared by the commands that take one

_TRAIN_JITTER = (0.4, 0.4, 0.4, 0.1)
_RECIPES = ("train", "train-jitter", "eval")
_RECIPE_OPTIONS = (
    _argument("--size", type=int, metavar="PX", help="side of the output (default 224)"),
    _argument("--resize", type=int, metavar="PX", help="eval: what the shorter side becomes (default 256)"),
    _argument("--interpolation", choices=("bilinear", "bicubic"), help="default bilinear"),
    _argument("--precision", choices=("float32", "uint8"), help="where pixels are rounded (default float32: nowhere)"),
    _argument("--exif", choices=("ignore", "apply"), help="what to do with EXIF orientation (default ignore)"),
    _argument("--dtype", choices=("float32", "float16", "bfloat16"), help="type of the batch (default float32)"),
)


_RECIPE_ARGUMENTS = (
    _argument("--recipe", default="train", metavar="RECIPE", help="train, train-jitter, eval, or a JSON file (train)"),
    *_RECIPE_OPTIONS,
)

# Further arguments of several commands
_DATA_SET = _argument("target", metavar="TARGET", help="a data set: images in class folders, tar shards, ...")
_BATCH_SIZE = _argument("--batch-size", type=int, default=64, metavar="N", help="samples in a batch (default 64)")
_AS_JSON = _argument("--json", action="store_true", help="print JSON instead of the table")


def _recipe(name: str, arguments: argparse.Namespace) -> Recipe:
    """The recipe that `name` and the options above describe."""
    from gpupipe.recipe import Output, Recipe

    names = ("size", "resize", "interpolation", "precision", "exif", "dtype")
    given = {option: getattr(arguments, option) for option in names if getattr(arguments, option) is not None}
    if name not in _RECIPES:
        if given:
            options = ", ".join(f"--{option}" for option in given)
            raise ConfigError(
                f"{options} cannot change the recipe in {name}: edit the file, or name one of {', '.join(_RECIPES)}",
                field=next(iter(given)),
                value=name,
                allowed=_RECIPES,
            )
        return _recipe_file(name)
    if "resize" in given and name != "eval":
        raise ConfigError(
            f"--resize belongs to the recipe eval, not to {name}: a random crop is resized to --size",
            field="resize",
            value=given["resize"],
        )
    if "dtype" in given:
        given["output"] = Output(dtype=given.pop("dtype"))
    if name == "eval":
        # torchvision's 256 for 224, for other sizes too.
        given.setdefault("resize", round(given.get("size", 224) * 256 / 224))
        return Recipe.eval(**given)
    return Recipe.train(jitter=_TRAIN_JITTER if name == "train-jitter" else None, **given)


def _recipe_file(name: str) -> Recipe:
    from gpupipe.recipe import Recipe

    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = f"a recipe is one of {', '.join(_RECIPES)}, or a JSON file"
        raise SourceError(f"cannot read the recipe {name!r} ({_why(error)}): {known}", uri=name) from error
    return Recipe.from_json(text)


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_MOST_NUMBERS = 10_000


def _numbers(text: str) -> tuple[int, ...]:
    """Integers >= 0 from "0,1,5-8"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of integers like 0,1,5-8")
        low, high = int(first), int(last or first)
        if len(found) + high - low >= _MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{text!r} has more than {_MOST_NUMBERS} numbers")
        found += range(low, high + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is empty")
    return tuple(found)


def _names(text: str) -> tuple[str, ...]:
    """Names from "numba,torchvision"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _size(text: str) -> int:
    """Bytes from "500M": K, M, G and T are powers of 1000."""
    number, power = text, 0
    if text[-1:].upper() in tuple("KMGT"):
        number, power = text[:-1], 1 + "KMGT".index(text[-1].upper())
    if not number.isdecimal() or len(number) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 1000000, 500M or 2G")
    return int(number) * int(1000**power)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("it is no JSON object")  # what it is may be secret
    return found


# The commands


@_command(
    "demo",
    "make a small data set, load it, compare the backends, and show what a model would see",
    _argument("--folder", metavar="DIR", help="use the images in this folder of class folders instead of making some"),
    _argument("--out", metavar="DIR", default="demo-out", help="where everything is written (default ./demo-out)"),
    _argument("--images", type=int, default=256, metavar="N", help="how many images to make (default 256)"),
)
def _demo(arguments: argparse.Namespace) -> int:
    """Make a small labelled data set, run the loader on it, compare the backends, and write contact sheets.

    The pictures are crops of those that scikit-image and scikit-learn ship; nothing is downloaded.
    """
    from gpupipe.demo import demo

    done = demo(folder=arguments.folder, out=arguments.out, images=arguments.images, say=_show, progress=_is_terminal())
    return OK if done.ok else NO


@_command(
    "parity",
    "compare two backends stage by stage; exit status 1 if a tolerance is broken",
    _argument("folder", metavar="FOLDER", help="images in class folders"),
    _argument("--backend", default="auto", metavar="NAME[:DEVICE]", help='what is tested, e.g. "dali:cpu" (auto)'),
    _argument("--reference", default="torchvision", metavar="NAME[:DEVICE]", help="what it must equal (torchvision)"),
    *_RECIPE_ARGUMENTS,
    _argument("--seeds", type=_numbers, default=(0,), metavar="LIST", help="like 0,1,5-8 (default 0)"),
    _argument("--epochs", type=_numbers, default=(0,), metavar="LIST", help="like 0,1,5-8 (default 0)"),
    _argument("--limit", type=int, metavar="N", help="at most N files, evenly spaced (default all)"),
    _argument("--decode", choices=("gpu", "hardware", "cpu"), default="gpu", help="where a GPU backend decodes (gpu)"),
    _argument("--html", metavar="FILE", help="write a page with the worst samples side by side"),
    _AS_JSON,
)
def _parity(arguments: argparse.Namespace) -> int:
    """Compare two backends stage by stage on the files of a folder.

    Stages: decode, resize, jitter, each operation of the recipe, normalise, erase, and the whole chain.
    Differences are in LSB: 1/255 of a pixel's range before normalisation. Exit status 1 if a tolerance is broken.
    """
    recipe = _recipe(arguments.recipe, arguments)
    from gpupipe.backends.base import Options
    from gpupipe.parity import check_parity

    report = check_parity(
        arguments.folder,
        recipe,
        backend=arguments.backend,
        reference=arguments.reference,
        seeds=arguments.seeds,
        epochs=arguments.epochs,
        limit=arguments.limit,
        options=Options(decode=arguments.decode),
        progress=_is_terminal(),
    )
    _show(report.to_json() if arguments.json else report.table())
    if arguments.html:
        written = report.write_html(arguments.html)
        if not arguments.json:
            _show(f"\npage: {written}")
    return OK if report.ok else NO


@_command(
    "bench",
    "measure how fast a data set is loaded, beside what else could be used",
    _DATA_SET,
    *_RECIPE_ARGUMENTS,
    _argument("--backend", default="auto", metavar="LIST", help='of gpupipe, e.g. "numba,torchvision" (auto)'),
    _argument(
        "--against",
        default="torchvision",
        metavar="LIST",
        help="torchvision, torchvision-tensors, dali-native, spdl, webdataset, ffcv (default torchvision)",
    ),
    _BATCH_SIZE,
    _argument("--images", type=int, default=1000, metavar="N", help="samples of a round (default 1000)"),
    _argument("--rounds", type=int, default=5, metavar="N", help="rounds that are measured (default 5)"),
    _argument("--workers", type=int, metavar="N", help="threads or processes of each (default: the cores)"),
    _argument("--plot", metavar="FILE", help="draw images a second over time, as PNG, SVG or PDF"),
    _AS_JSON,
)
def _bench(arguments: argparse.Namespace) -> int:
    """Load a data set as in training, in turn with its peers, and compare.

    Every contestant gets the same samples, recipe, batch size and number of workers, warms up for one epoch, and then
    takes its turn in every round. `--against ""` measures gpupipe alone.
    """
    recipe = _recipe(arguments.recipe, arguments)
    from gpupipe.measure.bench import bench

    report = bench(
        arguments.target,
        recipe,
        backends=_names(arguments.backend),
        against=_names(arguments.against),
        batch_size=arguments.batch_size,
        images=arguments.images,
        rounds=arguments.rounds,
        workers=arguments.workers,
        say=_tell,
    )
    _show(report.to_json() if arguments.json else report.table())
    _draw(report, arguments)
    return OK


@_command(
    "profile",
    "measure the pipeline alone, the training step alone and both, and say what holds training up",
    _DATA_SET,
    *_RECIPE_ARGUMENTS,
    _argument("--step", choices=("resnet18", "resnet50"), help="a training step to go with it (default none)"),
    _argument("--backend", default="auto", metavar="NAME[:DEVICE]", help='e.g. "numba" (auto)'),
    _BATCH_SIZE,
    _argument("--images", type=int, default=1000, metavar="N", help="samples of an epoch (default 1000)"),
    _argument("--threads", type=int, metavar="N", help="of the backend (default: the cores)"),
    _argument("--seconds", type=float, default=3.0, metavar="S", help="for each measurement (default 3)"),
    _argument("--plot", metavar="FILE", help="draw it, as PNG, SVG or PDF"),
    _AS_JSON,
)
def _profile(arguments: argparse.Namespace) -> int:
    """Measure in three steps: the pipeline alone, the training step alone, and both together.

    The differences say whether training waits for data, by how much, and for which stage. A step of your own, or a
    torch DataLoader, is profiled from Python: gpupipe.profile(loader, step=train_on_batch).
    """
    recipe = _recipe(arguments.recipe, arguments)
    from gpupipe.backends.base import Options
    from gpupipe.measure.profiling import profile

    name, _, device = arguments.backend.partition(":")
    report = profile(
        arguments.target,
        recipe,
        step=arguments.step,
        batch_size=arguments.batch_size,
        backend=name,
        device=device or None,
        options=Options(threads=arguments.threads),
        images=arguments.images,
        seconds=arguments.seconds,
        say=_tell,
    )
    _show(report.to_json() if arguments.json else report.table())
    _draw(report, arguments)
    return OK


@_command(
    "tune",
    "find the backend, threads and prefetch that load fastest here, or just fast enough",
    _DATA_SET,
    *_RECIPE_ARGUMENTS,
    _argument("--device", metavar="DEVICE", help="where batches go (default: a GPU where there is one)"),
    _BATCH_SIZE,
    _argument("--images-per-s", type=float, metavar="N", help="what training needs; then the cheapest that give it"),
    _argument("--memory-mb", type=float, metavar="MB", help="the most that the processes may hold"),
    _argument("--seconds", type=float, default=180.0, metavar="S", help="it takes no longer (default 180)"),
    _argument("--plot", metavar="FILE", help="draw what was tried, as PNG, SVG or PDF"),
    _argument("--save", metavar="FILE", help="write the options, for Loader(options=gpupipe.load_options(FILE))"),
    _AS_JSON,
)
def _tune(arguments: argparse.Namespace) -> int:
    """Try settings around the rule of thumb for a short time each, repeat the best two, and confirm the winner.

    The gain over the default is measured in fresh loaders that took no part in choosing.
    """
    recipe = _recipe(arguments.recipe, arguments)
    from gpupipe.measure.tuning import tune

    report = tune(
        arguments.target,
        recipe,
        batch_size=arguments.batch_size,
        device=arguments.device,
        images_per_s=arguments.images_per_s,
        memory_mb=arguments.memory_mb,
        seconds=arguments.seconds,
        say=_tell,
    )
    _show(report.to_json() if arguments.json else report.table())
    _draw(report, arguments)
    if arguments.save:
        written = report.save(arguments.save)
        if not arguments.json:
            _show(f"\noptions: {written}")
    return OK


@_command(
    "diagnose",
    "say why a training run waits, from the logs of gpupipe.watch; exit status 1 if something was found",
    _argument("logs", nargs="+", metavar="LOG", help="what gpupipe.watch(loader, log=...) wrote: one file a rank"),
    _argument("--plot", metavar="FILE", help="draw waits, steps, memory and use over the run, as PNG, SVG or PDF"),
    _argument("--json", action="store_true", help="print JSON instead of the text"),
)
def _diagnose(arguments: argparse.Namespace) -> int:
    """Say why a training run waits for data, or holds ever more, and what to change.

    Put `for batch in gpupipe.watch(loader, log="run-{rank}.jsonl")` into the training loop first.
    """
    from gpupipe.measure.diagnosing import diagnose

    found = diagnose(*arguments.logs)
    _show(found.to_json() if arguments.json else str(found))
    _draw(found, arguments)
    return NO if found.findings else OK


@_command(
    "selfcheck",
    "what works on this machine, and what to do about the rest; exit status 1 if something fails",
    _argument("--gpu", action="store_true", help="no usable GPU is a failure (also with GPUPIPE_REQUIRE_GPU=1)"),
    _AS_JSON,
)
def _selfcheck(arguments: argparse.Namespace) -> int:
    """Look at libraries, devices and decoders, and compare every backend's pixels on generated images.

    Made for new machines, health checks of containers, and bug reports.
    """
    from gpupipe.measure.selfcheck import selfcheck

    required = arguments.gpu or os.environ.get("GPUPIPE_REQUIRE_GPU") == "1"
    found = selfcheck(gpu=required, say=_tell)
    _show(found.to_json() if arguments.json else found.table())
    return OK if found.ok else NO


@_command(
    "pack",
    "copy a data set into tar shards, an LMDB environment, or one mapped file",
    _argument("source", metavar="SRC", help="a folder of class folders, tar shards, a list, ...: anything that opens"),
    _argument("dst", metavar="DST", help="a new or empty folder, or that of a run to go on with"),
    _argument("--format", choices=("tar", "lmdb", "memmap"), default="tar", help="default tar"),
    _argument("--shard-samples", type=int, metavar="N", help="most samples in a shard (default 10000)"),
    _argument("--shard-bytes", type=_size, metavar="SIZE", help="most bytes in a shard, like 500M (default 1G)"),
    _argument("--prefix", default="shard", metavar="NAME", help="shards are NAME-000000.tar, ... (default shard)"),
    _argument("--shuffle", type=int, metavar="SEED", help="store samples in a random order"),
    _argument("--resize", type=int, metavar="PX", help="re-encode images whose shorter side is longer than this"),
    _argument("--quality", type=int, default=90, metavar="Q", help="of re-encoded JPEGs (default 90)"),
    _argument("--raw", action="store_true", help="memmap: store decoded pixels"),
    _argument("--on-error", choices=("raise", "skip"), default="raise", help="records that cannot be read (raise)"),
    _argument("--verify", action="store_true", help="read everything back and compare it"),
    _argument("--threads", type=int, metavar="N", help="default: as suits this machine"),
    _argument("--json", action="store_true", help="print the manifest as JSON instead of a summary"),
)
def _pack(arguments: argparse.Namespace) -> int:
    """Copy a data set into few files, with labels, columns and class names; every byte as it is, unless told otherwise.

    A run that was stopped goes on when it is started again with the same arguments. The folder then opens like any
    other data set, and its tar shards are those of webdataset.
    """
    from gpupipe.packing import PackOptions, pack

    names = ("shard_samples", "shard_bytes", "prefix", "shuffle", "resize", "quality", "raw")
    manifest = pack(
        arguments.source,
        arguments.dst,
        format=arguments.format,
        options=PackOptions(**{name: getattr(arguments, name) for name in names}),
        on_error=arguments.on_error,
        verify=arguments.verify,
        threads=arguments.threads,
        progress=_is_terminal(),
    )
    _show(manifest.to_json() if arguments.json else manifest.table())
    if arguments.verify and not arguments.json:
        _show("verified: everything read back is as it was written")
    return OK


@_command(
    "index",
    "index tar shards or a folder of images, so that they open without being read or listed",
    _argument("target", metavar="TARGET", help="x.tar, 'x-*.tar', 'x-{000..146}.tar', or a folder of shards or images"),
    _argument("--label", default="cls", metavar="EXT", help="the label's file in shards: cls, json:path, none (cls)"),
    _argument("--dali", action="store_true", help="write the .idx files of DALI's webdataset reader, too"),
    _argument("--json", action="store_true", help="print JSON instead of the summary"),
)
def _index(arguments: argparse.Namespace) -> int:
    """Write the indexes that let a data set open at once. Those that fit are kept, others made anew."""
    from gpupipe.packing.indexing import index_target

    label = None if arguments.label == "none" else arguments.label
    found = index_target(arguments.target, label=label, dali=arguments.dali)
    _show(found.to_json() if arguments.json else found.table())
    return OK


@_command(
    "inspect",
    "say what is in a data set; exit status 1 if records are unreadable or keys repeated",
    _argument("target", metavar="TARGET", help="anything that opens"),
    _argument("--decode", action="store_true", help="decode every image, which finds damage behind the headers"),
    _argument("--cache-dir", metavar="DIR", help="for URLs and compressed tar shards: where the cache is"),
    _argument("--threads", type=int, metavar="N", help="default: as suits this machine"),
    _argument("--json", action="store_true", help="print JSON instead of the tables"),
)
def _inspect(arguments: argparse.Namespace) -> int:
    """Read every record of a data set: counts, classes, sizes, formats, and what is wrong."""
    from gpupipe.inspection import inspect_source
    from gpupipe.sources import open_source

    options = {} if arguments.cache_dir is None else {"cache_dir": arguments.cache_dir}
    source = open_source(arguments.target, **options)
    try:
        found = inspect_source(source, decode=arguments.decode, threads=arguments.threads, progress=_is_terminal())
    finally:
        source.close()
    _show(found.to_json() if arguments.json else found.table())
    return OK if found.ok else NO


@_command(
    "cache",
    "what is in a local cache; check it; empty it",
    _argument("action", choices=("status", "verify", "clear"), help="what to do"),
    _argument("folder", metavar="DIR", help="the cache: what was given as cache_dir="),
    _argument("--json", action="store_true", help="print JSON instead of the summary"),
)
def _cache(arguments: argparse.Namespace) -> int:
    """Look after the cache of remote data sets. Processes that use it may go on meanwhile.

    status: how much is in it. verify: read every entry, and remove those whose bytes are not what was fetched; exit
    status 1 if there were any. clear: remove all that no process has in use.
    """
    from gpupipe.cache import Cache

    cache = Cache.existing(arguments.folder)
    try:
        if arguments.action == "verify":
            from gpupipe.progress import progress_bar

            with progress_bar(cache.status().entries, "verifying", show=_is_terminal(), unit="entry") as done:
                check = cache.verify(done)
            _show(check.to_json() if arguments.json else check.table())
            return OK if check.ok else NO
        status = cache.clear() if arguments.action == "clear" else cache.status()
        _show(status.to_json() if arguments.json else status.table())
    finally:
        cache.close()
    return OK


@_command(
    "stage",
    "fetch a remote data set into the local cache, before training",
    _argument("url", metavar="URL", help="a data set, such as s3://bucket/train/ or 's3://bucket/train-*.tar'"),
    _argument("--cache-dir", required=True, metavar="DIR", help="where the cache is"),
    _argument("--cache-bytes", metavar="SIZE", help="the most that it keeps, like 200GB (default: what the disk has)"),
    _argument("--storage-options", type=_json_object, metavar="JSON", help="""to fsspec, such as '{"anon": true}'"""),
    _argument("--label", metavar="EXT", help="the label's file in tar shards: cls, json:path, none (cls)"),
)
def _stage(arguments: argparse.Namespace) -> int:
    """Fetch all of a data set into the cache, and say what that took. What is there already is not fetched again."""
    from gpupipe.sources import open_source
    from gpupipe.sources.remote import stage

    names = ("cache_dir", "cache_bytes", "storage_options")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.label is not None:
        options["label"] = None if arguments.label == "none" else arguments.label
    source = open_source(arguments.url, **options)
    try:
        stage(source, progress=_is_terminal())
        stats = getattr(source, "cache_stats", None)
        fetched = 0 if stats is None else stats.fetched_bytes
        _show(f"{len(source)} records of {source.uri} are in {arguments.cache_dir}; {fetched:,} bytes were fetched")
    finally:
        source.close()
    return OK


@_command(
    "recipe",
    "print a recipe as JSON, or its fingerprint",
    _argument("recipe", nargs="?", default="train", metavar="RECIPE", help="train, train-jitter, eval, or a JSON file"),
    *_RECIPE_OPTIONS,
    _argument("--fingerprint", action="store_true", help="print the fingerprint instead"),
)
def _show_recipe(arguments: argparse.Namespace) -> int:
    """Print a recipe as JSON: a start for one's own, which every command takes as `--recipe FILE`."""
    recipe = _recipe(arguments.recipe, arguments)
    _show(recipe.fingerprint if arguments.fingerprint else recipe.to_json())
    return OK


def _draw(report: Any, arguments: argparse.Namespace) -> None:
    """The picture of a report, where one was asked for."""
    if arguments.plot:
        written = report.plot(arguments.plot)
        if not arguments.json:
            _show(f"\npicture: {written}")


def _tell(line: str) -> None:
    """What is going on, beside the result."""
    print(line, file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    """Whether a progress bar on stderr would be seen by someone."""
    return sys.stderr is not None and sys.stderr.isatty()
