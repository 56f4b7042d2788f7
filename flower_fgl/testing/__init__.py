"""The tests that every method must pass, for methods of other packages too.

A test module of such a package needs four lines, and pytest does the rest::

    from flower_fgl.testing import MethodCase, MethodContract

    class TestMyMethod(MethodContract):
        cases = [MethodCase("my-method")]

``flower-fgl new`` writes this module. The package must be installed, so that its entry
point is found.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "flower_fgl.testing needs pytest: pip install pytest"
    ) from error

# Failed assertions then show their values, as those of test modules do.
pytest.register_assert_rewrite(
    *(f"flower_fgl.testing.{name}" for name in ("case", "exchanges", "runs"))
)

# ruff: noqa: E402
from flower_fgl.testing.case import SMALL, Contract, MethodCase, comparable
from flower_fgl.testing.exchanges import ExchangeContract, WireContract
from flower_fgl.testing.runs import RayContract, RunContract, SettingContract

__all__ = ["SMALL", "Contract", "ExchangeContract", "MethodCase", "MethodContract"]
__all__ += ["RayContract", "RunContract", "SettingContract", "WireContract"]
__all__ += ["comparable"]


class MethodContract(ExchangeContract, RunContract, SettingContract, WireContract):
    """All checks of a method that need no other process; a minute for most methods."""
