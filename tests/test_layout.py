"""The project's own rules: which folder may import which, the length of files, and whose `kernels` is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from moe_titan.startup import check_kernels_package

ROOT = Path(__file__).resolve().parents[1]
OURS = {"kernels", "float8", "parallelisms", "moe_titan", "train", "tests", "benchmarks"}
MAY_IMPORT = {
    "kernels": {"kernels"},
    "float8": {"float8", "kernels"},
    "parallelisms": {"parallelisms", "float8", "kernels"},
    "moe_titan": {"moe_titan", "parallelisms", "float8", "kernels"},
    "train.py": {"moe_titan", "parallelisms", "float8", "kernels"},
}
MAX_LINES = 500


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it, relative imports resolved."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level]
            assert package, f"{path}: a relative import leaves the package"
            names.add(package[0])
    return names


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    files = [ROOT / part] if part.endswith(".py") else python_files(part)
    wrong = {
        str(path.relative_to(ROOT)): sorted(forbidden)
        for path in files
        if (forbidden := (imported_packages(path) & OURS) - MAY_IMPORT[part])
    }
    assert not wrong, f"{part} may import {sorted(MAY_IMPORT[part])} of ours only"


def test_files_are_short() -> None:
    files = [*ROOT.glob("*.py"), *python_files("kernels", "float8", "parallelisms", "moe_titan", "tests", "benchmarks")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert "moe_titan/startup.py" in lengths
    assert not {name: length for name, length in lengths.items() if length >= MAX_LINES}


def test_kernels_is_ours_beside_transformers() -> None:
    """transformers looks for the Hugging Face package of the same name when it loads a model class."""
    code = """
from transformers import Qwen3MoeForCausalLM
from moe_titan.startup import check_kernels_package
import kernels
check_kernels_package()
print(kernels.__file__)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


def test_other_kernels_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=f"finds {tmp_path / 'kernels'} instead of .*{ROOT / 'kernels'}"):
        check_kernels_package()
