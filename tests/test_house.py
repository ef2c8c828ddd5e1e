"""The rules of the house: on this tree, and on planted breaches that show that the check can fail."""

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = ROOT / ".ci" / "check_arrows.py"

check = runpy.run_path(str(CHECK))
findings: Callable[[Path], Iterator[str]] = check["findings"]
ARROWS: tuple[str, ...] = check["ARROWS"]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small house in order, which uses what the rules allow."""
    modules = {
        "__init__.py": "from .workflow import quantize\n",
        "__main__.py": "from .cli import main\n",
        "workflow.py": "from .annotators.blocks import annotate\nfrom .reports import table\n",
        "cli/__init__.py": "from .. import __version__, workflow\nfrom ..observers import Range\n",
        "reports/__init__.py": "from ..checks import check\n",
        "checks/__init__.py": "from ..configs.base import Config\n",
        "annotators/__init__.py": "",
        "annotators/blocks.py": "from . import graph\nfrom .. import configs\n",
        "annotators/graph.py": "def late():\n    from tosa import run\n",
        "configs/__init__.py": "if TYPE_CHECKING:\n    import executorch.exir\n",
        "configs/base.py": "from ..observers import Range\n",
        "observers/__init__.py": "import torch\nconsole.print(1)\n",
        "observers/long.py": "x = 1\n" * 500,
        "tests/test_x.py": "from quantmark import configs\nassert print(configs)\n",
    }
    for name, source in modules.items():
        plant(tmp_path, name, source)
    return tmp_path


def plant(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source, encoding="utf-8")


def test_this_tree_is_in_order() -> None:
    assert list(findings(ROOT)) == []


def test_a_house_in_order_has_no_findings(house: Path) -> None:
    assert list(findings(house)) == []


@pytest.mark.parametrize(
    ("name", "source", "finding"),
    [
        ("observers/x.py", "from ..configs import base", "observers/ imports configs/ against the arrow"),
        (
            "configs/x.py",
            "from ..annotators.blocks import annotate",
            "configs/ imports annotators/ against the arrow",
        ),
        ("annotators/x.py", "from .. import checks", "annotators/ imports checks/ against the arrow"),
        (
            "checks/x.py",
            "def f():\n  from ..reports import table",
            "checks/ imports reports/ against the arrow",
        ),
        ("reports/x.py", "import os\nfrom ..cli import main", "reports/ imports cli/ against the arrow"),
        (
            "reports/deep.py",
            "from ..workflow import quantize",
            "imports workflow.quantize from the root",
        ),
        ("checks/x.py", "from .. import __version__", "imports __version__ from the root"),
        ("checks/x.py", "from .. import *", "imports * from the root"),
        ("other.py", "from .workflow import quantize", "imports workflow.quantize from the root"),
        ("workflow.py", "from .. import observers", "imports from above the package"),
        ("cli/x.py", "from quantmark.configs import base", "imports quantmark.configs absolutely"),
        ("cli/x.py", "import quantmark", "imports quantmark absolutely"),
        ("cli/x.py", "from configs import base", "imports configs absolutely"),
        ("configs/x.py", "from executorch.exir import to_edge", "imports executorch at module level"),
        ("configs/x.py", "try:\n  import tosa\nexcept ImportError: pass", "imports tosa at module level"),
        ("configs/x.py", "class C:\n  import ethosu.vela", "imports ethosu at module level"),
        ("configs/x.py", "if not TYPE_CHECKING:\n  import tosa", "imports tosa at module level"),
        ("configs/x.py", "if TYPE_CHECKING:\n  pass\nelse:\n  import tosa", "imports tosa at module level"),
        ("cli/x.py", "def f():\n  print(1)", "prints: return it, or hand it to reports/"),
        ("cli/x.py", "def f():\n  assert f", "asserts: raise a named error"),
        ("cli/x.py", "x = 1\n" * 501, "over 500 lines"),
        ("extra/__init__.py", "", "a folder that no arrow leads to"),
    ],
)
def test_a_planted_breach_is_found(house: Path, name: str, source: str, finding: str) -> None:
    plant(house, name, source)
    (found,) = findings(house)
    place, _, what = found.partition(": ")
    assert what == finding
    assert place.split(":")[0] == name


def test_the_command_fails_on_a_breach(house: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, CHECK, house], capture_output=True, text=True, check=False)

    assert run().returncode == 0
    plant(house, "observers/x.py", "from ..cli import main")
    failed = run()
    assert failed.returncode == 1
    assert failed.stdout == "observers/x.py:1: observers/ imports cli/ against the arrow\n"


def test_an_empty_folder_is_no_house(tmp_path: Path) -> None:
    assert list(findings(tmp_path)) == [f"{tmp_path}: holds no package"]


def test_every_package_is_listed_for_the_wheel() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = {init.parent.relative_to(ROOT) for folder in ARROWS for init in (ROOT / folder).rglob("__init__.py")}
    assert packages >= {Path(folder) for folder in ARROWS}
    missing = [path for path in packages if f'"{".".join(("quantmark", *path.parts))}",' not in project]
    assert missing == []


def test_importing_the_package_imports_no_backend() -> None:
    code = "import sys, quantmark; print(*(m for m in ('executorch', 'sklearn', 'tosa') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
