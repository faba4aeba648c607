"""Checks of the Python environment, made before anything else is imported or started."""

from importlib.util import find_spec
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def check_kernels_package() -> None:
    """Make sure that `import kernels` finds the folder beside this package.

    Hugging Face publishes a package of the same name, and whichever comes first on `sys.path` wins.

    Raises:
        ImportError: `kernels` is another package; the message gives where it lies and the cure.
    """
    spec = find_spec("kernels")
    found = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if found != CHECKOUT / "kernels":
        raise ImportError(
            f"`import kernels` finds {found or 'no package'} instead of moe_titan's own {CHECKOUT / 'kernels'}. "
            "Start train.py from the checkout, take other folders with a `kernels` package out of PYTHONPATH, "
            "or `pip uninstall kernels` (the Hugging Face package of that name)."
        )
