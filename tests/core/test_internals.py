"""Private modules of the packages are named in ``tests/internals`` alone: read from the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from public_api import FOLDER, MODULES

HERE = Path(__file__).parents[1]
INTERNALS = HERE / "internals"
FILES = [path for path in sorted(HERE.rglob("*.py")) if not path.is_relative_to(INTERNALS)]
PACKAGES = {modules[0] for modules in MODULES.values()}
PUBLIC = {module for modules in MODULES.values() for module in modules}
PARENTS = {module.rpartition(".")[0] for module in PUBLIC} - {""}
NAMES = {
    found[0]
    for path in FOLDER.glob("*.txt")
    for line in path.read_text().splitlines()
    if (found := re.match(r"[\w.]+", line))
}
#: What takes the name of a module, or of something in one, as text.
BY_NAME = {"setattr", "delattr", "patch", "import_module", "importorskip", "find_spec"}


def is_public(name: str) -> bool:
    """Whether users may name it: a module, or a name of one and what follows."""
    if name.partition(".")[0] not in PACKAGES or name in PUBLIC | PARENTS | NAMES:
        return True
    module, _, last = name.rpartition(".")
    if module in PUBLIC:
        return last.startswith("__") and last.endswith("__")
    return module not in PACKAGES | PARENTS and is_public(module)


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines, and the names in full that they import, reach or patch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in BY_NAME and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def private(text: str) -> list[str]:
    """The lines of a file that name something private, with the name."""
    found = named(ast.parse(text))
    return sorted(f"{line}: {name}" for line, name in found if not is_public(name))


def test_private_modules_are_named_in_one_place() -> None:
    found = {str(path.relative_to(HERE)): private(path.read_text()) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import ring_core.plan.plan",
        "from ring_core.plan import plan",
        "from ring_core import plan",
        "from ring_core.tools import cli",
        "def late():\n    from ring_torch.comm.ranks import Ranks",
        "import ring_core\nring_core.plan.plan._make_plan.cache_clear()",
        "patch.setattr('ring_torch.context.check_model', None)",
        "importlib.import_module('ring_jax.records')",
    ],
)
def test_a_private_module_is_seen(text: str) -> None:
    assert len(private(text)) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "import ring_core.cost",
        "from ring_core import Mask, __version__, cost",
        "from ring_core.tools import bench",
        "from ring_torch.local import LocalRanks",
        "import ring_jax\nring_jax.equinox.convert.__name__\nring_jax.__file__",
        "import ring_core\nring_core.Mask.band.fget",
        "from internals.core import plan",
        "patch.setattr('ring_torch.ring_attention', None)",
    ],
)
def test_public_names_are_left_alone(text: str) -> None:
    assert private(text) == []


def test_every_name_is_there_for_a_test() -> None:
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in FILES)))
    trees = [ast.parse(path.read_text()) for path in INTERNALS.glob("*.py")]
    given = [x for tree in trees for x in tree.body if isinstance(x, ast.ImportFrom)]
    names = [alias.asname or alias.name for one in given for alias in one.names]
    assert len(names) > 100
    assert [name for name in names if name not in words] == []
