"""The import of the amdsmi package: what is missing is named, and nothing is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import amdsmi_library
from wattspan.ports import SourceContext, SourceError
from wattspan.sources.amdsmi.calls import BindingError, load_binding
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.amdsmi.source import open_amdsmi
from wattspan.testing import FakeDirectory, ManualClock


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package ``amdsmi`` that is found before the installed one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "amdsmi.py"


def cause() -> str:
    with pytest.raises(BindingError) as caught:
        load_binding()
    sys.modules.pop("amdsmi", None)
    assert caught.value.remedy.endswith(".")
    return caught.value.cause


def test_missing_library_is_named_and_nothing_is_printed(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the package does: it prints, and fails by a KeyError."""
    package.write_text("print('Unable to find libamd_smi.so'); {}['libamd_smi.so']")
    assert cause() == "libamd_smi.so was not found"
    assert capsys.readouterr().out == ""


def test_missing_package_is_named(package: Path) -> None:
    package.write_text("raise ModuleNotFoundError(name='amdsmi')")
    assert cause() == "the Python package amdsmi is not installed"


def test_missing_dependency_of_the_package_is_its_fault(package: Path) -> None:
    package.write_text("import no_such_module")
    assert "no_such_module" in cause()


@pytest.mark.parametrize("error", ["AttributeError('x')", "SyntaxError('y')", "RuntimeError('z')"])
def test_package_that_does_not_load_is_reported(package: Path, error: str) -> None:
    package.write_text(f"raise {error}")
    assert "does not load" in cause()


@pytest.mark.needs_cc
def test_symbol_that_an_older_library_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed package binds all symbols at its import."""
    amdsmi_library.build(tmp_path, without={"amdsmi_get_gpu_xcd_counter"})
    monkeypatch.delenv("ROCM_HOME", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert cause().startswith("libamd_smi.so has no amdsmi_get_gpu_xcd_counter: it is older")


def test_source_is_absent_without_the_library_unless_it_is_required(package: Path) -> None:
    package.write_text("{}['libamd_smi.so']")
    context = SourceContext(ManualClock(), FakeDirectory())
    assert open_amdsmi(AmdSmiSettings(), context) is None
    with pytest.raises(SourceError, match=r"libamd_smi\.so was not found"):
        open_amdsmi(AmdSmiSettings(enabled=True), context)
    assert open_amdsmi(AmdSmiSettings(enabled=False), context) is None


def test_deadline_is_longer_than_the_interval() -> None:
    with pytest.raises(ValueError, match="longer than the interval"):
        AmdSmiSettings(deadline=AmdSmiSettings().interval)
