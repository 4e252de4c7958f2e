"""Who may import whom: DESIGN's layers, read from the source; and what `import gpupipe` costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpupipe

PACKAGE = Path(gpupipe.__file__).parent

# Low to high. A unit is a module or a package directly below gpupipe; it imports itself and what stands in rows above.
LAYERS = (
    ("errors", "files", "forks", "parallel", "progress"),
    ("checks", "steps", "functions", "cache"),
    ("remote",),
    ("recipe", "records", "rng", "collating", "trees"),
    ("prefetching", "mixing", "views"),
    ("convert", "presets", "pillow"),
    ("headers",),
    ("decode", "faults"),
    ("augmentation",),
    ("plan", "geometry", "sources", "sampling"),
    ("backends",),
    ("reading", "state"),
    ("passes",),
    ("ahead",),
    ("repair", "finishing"),
    ("iteration", "fields"),
    ("loader",),
    ("parity", "packing", "inspection"),
    ("measure",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {unit: height for height, units in enumerate(LAYERS) for unit in units}
# Lower, and still none of its business: a backend is handed records, and knows nothing of where they come from.
FORBIDDEN = {("backends", "sources"), ("backends", "sampling"), ("backends", "cache")}
# Upwards, but only inside functions: `Recipe.from_torchvision` would otherwise make every recipe import torch.
INSIDE_FUNCTIONS = {("recipe", "convert"), ("recipe", "presets")}
MODULE_NAME = re.compile(r"gpupipe(\.\w+)+")


def unit_of(module: str) -> str:
    """ "gpupipe.sources.folder" -> "sources"."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(source: str) -> list[tuple[int, str, bool]]:
    """Line, module and whether it stands inside a function, of all of a file's imports from gpupipe.

    A string that is a module's name counts too: registries import by name.
    """
    found: list[tuple[int, str, bool]] = []

    def visit(node: ast.AST, *, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, inside) for alias in node.names if alias.name.startswith("gpupipe"))
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "." * node.level + (node.module or ""), inside))
        elif isinstance(node, ast.ImportFrom) and node.module == "gpupipe":
            found.extend((node.lineno, f"gpupipe.{alias.name}", inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpupipe."):
            found.append((node.lineno, node.module or "", inside))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            found.append((node.lineno, node.value, inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside=inside)

    visit(ast.parse(source), inside=False)
    return found


def problems(unit: str, source: str) -> list[str]:
    """What a file of a unit imports and must not."""
    if unit not in HEIGHT:
        return [f"{unit} has no layer: give it one in tests/test_layers.py"]
    found = []
    for line, module, inside in imports(source):
        other = unit_of(module)
        if module.startswith("."):
            found.append(f"line {line}: {module} is a relative import; write gpupipe. ...")
        elif module == "gpupipe.__version__" or other == unit:
            continue
        elif other not in HEIGHT:
            found.append(f"line {line}: {module} is in no layer")
        elif (unit, other) in INSIDE_FUNCTIONS:
            if not inside:
                found.append(f"line {line}: {unit} may import {other} inside functions only")
        elif HEIGHT[other] >= HEIGHT[unit]:
            found.append(f"line {line}: {unit} imports {other}, which is not below it")
        elif (unit, other) in FORBIDDEN:
            found.append(f"line {line}: {unit} must not know of {other}")
    return found


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", files())
def test_module_imports_only_from_the_layers_below_it(path):
    unit = Path(path).parts[0].removesuffix(".py")
    assert problems(unit, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("unit", "source", "said"),
    [
        ("backends", "from gpupipe.sources import open_source", "must not know of sources"),
        ("backends", "def f():\n    from gpupipe.sampling.rank import find_ranks", "line 2: backends must not know of"),
        ("backends", "from gpupipe import cache", "must not know of cache"),
        ("sources", "from gpupipe.backends.base import Options", "imports backends, which is not below it"),
        ("sources", "import gpupipe.sampling.rank", "imports sampling, which is not below it"),
        ("plan", "if True:\n    from gpupipe.loader import Loader", "line 2: plan imports loader"),
        ("recipe", "from gpupipe.convert import from_torchvision", "inside functions only"),
        ("recipe", "def f():\n    from gpupipe import plan", "recipe imports plan"),
        ("errors", "import gpupipe.recipe", "errors imports recipe"),
        ("sources", "MODULES = {'dali': 'gpupipe.backends.dali'}", "sources imports backends"),
        ("loader", "from .plan import draw", ".plan is a relative import"),
        ("loader", "from gpupipe import Recipe", "gpupipe.Recipe is in no layer"),
        ("loader", "import gpupipe", "gpupipe is in no layer"),
        ("helpers", "", "helpers has no layer"),
    ],
)
def test_import_that_breaks_the_layers_is_found(unit, source, said):
    found = problems(unit, source)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("recipe", "class A:\n    def f(self):\n        from gpupipe.convert import from_torchvision"),
        ("backends", "from gpupipe.backends.base import Options\nfrom gpupipe import decode, plan"),
        ("cli", "from gpupipe import __version__\nimport numpy, gpupipe.loader"),
        ("loader", "'''Joins gpupipe.sources and the rest.'''"),
    ],
)
def test_import_that_keeps_the_layers_is_let_pass(unit, source):
    assert problems(unit, source) == []


HEAVY = ("torch", "torchvision", "PIL", "nvidia.dali", "numba", "scipy", "pandas")


def heavy_modules_after(code: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has loaded once the code has run."""
    report = f"import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_of_the_package_loads_nothing_heavy():
    assert heavy_modules_after("import gpupipe; dir(gpupipe); gpupipe.__version__") == []


def test_recipes_plans_and_errors_load_nothing_heavy():
    code = """
import gpupipe as gp
recipe = gp.Recipe.from_json(gp.Recipe.train(jitter=(0.4, 0.4, 0.4, 0.1)).to_json())
gp.make_plan(recipe, seed=0, epoch=0, indices=[1], sizes=[(30, 40)])
gp.ConfigError, gp.DecodeError
gp.Collate(columns={"tokens": gp.Pad(dtype="int32"), "boxes": gp.Ragged(), "score": gp.Stack(), "text": gp.Keep()})
"""
    assert heavy_modules_after(code) == []


def test_heavy_imports_are_noticed():
    assert heavy_modules_after("import PIL") == ["PIL"]
