"""Which backends there are, which of them `backend="auto"` takes, and how to make one.

Importing this module imports no backend: each brings heavy libraries that the others do not need.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from gpupipe.errors import BackendUnavailable, ConfigError
from gpupipe.recipe import Recipe
from gpupipe.views import Views

if TYPE_CHECKING:
    import torch

    from gpupipe.backends.base import Backend, Options


@dataclass(frozen=True, slots=True)
class _Entry:
    """A backend that can be asked for.

    Attributes:
        module, cls: Where its class is; made with (recipe, *, device, batch_size, options).
        needs: The library it needs besides gpupipe's core; its import shows whether it can run here.
        install: How to get that.
        takes_views: Whether it makes several views by itself.
        takes_functions: Whether it applies the functions of a recipe by itself.
    """

    module: str
    cls: str
    needs: str
    install: str
    takes_views: bool = True
    takes_functions: bool = True


_BACKENDS = {
    "dali": _Entry(
        "gpupipe.backends.dali",
        "DaliBackend",
        "nvidia.dali",
        "pip install nvidia-dali-cuda120 (Linux only)",
        takes_views=False,
        takes_functions=False,
    ),
    "numba": _Entry("gpupipe.backends.numba_cpu", "NumbaBackend", "numba", "pip install 'gpupipe[fast]'"),
    "torchvision": _Entry(
        "gpupipe.backends.torchvision_cpu", "TorchvisionBackend", "torchvision", "pip install torchvision"
    ),
}
# What "auto" tries on the CPU, the fastest first.
_ON_CPU = ("numba", "torchvision")


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend that can run here.

    Attributes:
        name: As `create` takes it.
        device: Where its batches are; a CUDA device has an index.
        reason: A sentence that says what was chosen, and why.
    """

    name: str
    device: torch.device
    reason: str

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


def choose(backend: str, device: torch.device | str | None = None) -> Choice:
    """Settle which backend runs where, by what this machine has.

    Args:
        backend: "auto", or the name of a backend. "auto" takes DALI where there is a CUDA device that torch can use
            and DALI can be imported, else the fastest backend for the CPU.
        device: "cpu", "cuda", "cuda:1", a `torch.device`, or None: a CUDA device for DALI, else the CPU. "cuda"
            without an index is torch's current device. Backends for the CPU copy their batches to a CUDA device.

    Raises:
        ConfigError: An unknown backend, or a device that is neither a CPU nor a CUDA device.
        BackendUnavailable: A backend or device that this machine does not have; says what to do.
    """
    if not isinstance(backend, str) or (backend != "auto" and backend not in _BACKENDS):
        names = ("auto", *_BACKENDS)
        raise ConfigError(
            f"backend={backend!r} is not valid: it must be one of {', '.join(map(repr, names))}",
            field="backend",
            value=backend,
            allowed=names,
        )
    wanted = _parse_device(device)
    if wanted is not None and wanted.type == "cuda":
        _require_cuda(f'device="{device}"', backend, wanted)
    if backend == "auto":
        return _choose_automatically(wanted)
    entry = _BACKENDS[backend]
    problem = import_problem(entry.needs)
    if problem is not None:
        raise _unavailable(backend, problem)
    why = f'backend="{backend}" was asked for'
    if backend == "dali" and wanted is None:
        _require_cuda('backend="dali" without a device', backend)
        return _chosen(backend, _parse_device("cuda"), f"{why}, and a CUDA device was found")
    return _chosen(backend, wanted, why)


def create(
    name: str, recipe: Recipe | Views, *, device: torch.device | str, batch_size: int, options: Options | None = None
) -> Backend:
    """Make a backend.

    Args:
        name: The name of a backend, as in `Choice.name`.
        recipe: What it will do to each image; or views of it.
        device: As in `Choice.device`.
        batch_size: The most rows of a batch.
        options: How it works; None: `Options()`.

    Raises:
        ConfigError: An unknown name, or a recipe or option that this backend cannot do.
        BackendUnavailable: A library or device is missing.
    """
    from gpupipe.backends.base import Options

    choice = choose(name, device)
    entry = _BACKENDS[choice.name]
    options = options or Options()
    if isinstance(recipe, Views) and not entry.takes_views:
        return _side_by_side(choice, recipe, batch_size, options)
    cls = getattr(importlib.import_module(entry.module), entry.cls)
    if isinstance(recipe, Views) or not recipe.sample_functions or entry.takes_functions:
        return cast("Backend", cls(recipe, device=choice.device, batch_size=batch_size, options=options))
    from gpupipe.backends.sample_functions import WithFunctions, before_functions

    inner = cls(before_functions(recipe), device=choice.device, batch_size=batch_size, options=options)
    return WithFunctions(inner, recipe)


def _side_by_side(choice: Choice, views: Views, batch_size: int, options: Options) -> Backend:
    """A backend for each view. What a GPU decodes, it decodes for each of them; on the host it is decoded once."""
    from gpupipe.backends.side_by_side import SideBySide

    made: list[Backend] = []
    try:
        for view in views.recipes:
            made.append(create(choice.name, view, device=choice.device, batch_size=batch_size, options=options))
        on_gpu = choice.device.type == "cuda" and options.decode != "cpu"
        return SideBySide(made, views, batch_size=batch_size, threads=0 if on_gpu else options.threads)
    except BaseException:
        for backend in made:
            backend.close()
        raise


def _choose_automatically(wanted: torch.device | None) -> Choice:
    missing_cuda = cuda_problem()
    if wanted is not None and wanted.type == "cpu":
        why = 'device="cpu" was asked for'
    elif missing_cuda is not None:
        why = missing_cuda
    else:
        problem = import_problem(_BACKENDS["dali"].needs)
        if problem is None:
            return _chosen("dali", wanted or _parse_device("cuda"), "a CUDA device was found")
        why = f"{problem}; {_BACKENDS['dali'].install} to decode on the GPU"
    for name in _ON_CPU:
        problem = import_problem(_BACKENDS[name].needs)
        if problem is None:
            return _chosen(name, wanted, why)
        why += f"; {problem} ({_BACKENDS[name].install} for the faster {name} backend)"
    raise _unavailable(_ON_CPU[-1], str(problem))


def _chosen(name: str, device: torch.device | None, why: str) -> Choice:
    found = device or _cpu()
    if found.type == "cpu":
        place = "the CPU"
    elif name == "dali":
        place = f"CUDA device {found.index}"
    else:
        place = f"the CPU, with batches copied to CUDA device {found.index}"
    return Choice(name, found, f"{name} on {place}: {why}")


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def _parse_device(device: torch.device | str | None) -> torch.device | None:
    """A CPU, or a CUDA device with an index if there is CUDA."""
    if device is None:
        return None
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={device!r} is not valid: it must be 'cpu', 'cuda', 'cuda:<number>' or None; batches for other "
            "devices are made on the CPU and moved by you",
            field="device",
            value=device,
            allowed=("cpu", "cuda", "cuda:<number>", None),
        )
    if found.type == "cpu":
        return torch.device("cpu")
    if found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def cuda_problem() -> str | None:
    """Why CUDA cannot be used; None where it can."""
    import torch

    if torch.version.cuda is None:
        return "no CUDA device was found (torch was built without CUDA)"
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    return None


def _require_cuda(asked: str, backend: str, device: torch.device | None = None) -> None:
    import torch

    problem = cuda_problem()
    if problem is None and device is not None and device.index >= torch.cuda.device_count():
        problem = f"the CUDA devices here are numbered from 0 to {torch.cuda.device_count() - 1}"
    if problem is None:
        return
    on_cpu = "the same graph on DALI's CPU operators, for tests" if backend == "dali" else "everything on the CPU"
    raise BackendUnavailable(
        f"{asked} cannot be had: {problem}. Use a machine with an NVIDIA GPU and a CUDA build of torch; or "
        f'device="cpu", which runs {on_cpu}; or backend="auto" without a device, which takes the best there is',
        backend=backend,
        missing="a CUDA device",
        install="a CUDA build of torch: https://pytorch.org/get-started/locally/",
    )


def import_problem(library: str) -> str | None:
    """Why a library cannot be used; None where it can, and then it is imported."""
    try:
        importlib.import_module(library)
    except Exception as error:  # a broken library raises anything: OSError, AttributeError, ...
        return f"{library} cannot be imported ({type(error).__name__}: {error})"
    return None


def _unavailable(backend: str, problem: str) -> BackendUnavailable:
    entry = _BACKENDS[backend]
    return BackendUnavailable(
        f'backend="{backend}" cannot run here: {problem}. Install it ({entry.install}), or use backend="auto"',
        backend=backend,
        missing=entry.needs,
        install=entry.install,
    )
