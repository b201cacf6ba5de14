"""The import of the amdsmi package: what is missing is named, and nothing is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from testbed import amdsmi_library

from wattspan.ports import SourceContext, SourceError
from wattspan.sources.amdsmi.device import AmdSmiSettings
from wattspan.sources.amdsmi.source import BindingError, load_binding, open_amdsmi, sdk_modules
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


# ------------------------------------------------------------------------------- SDK of ROCm


def sdk(root: Path, text: str = "here = __file__") -> Path:
    """A root of ROCm 10, whose module is shipped and not installed."""
    package = root / "share/amd_smi/amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return root


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed package of PyPI, which cannot load the library; the path is restored."""
    package.write_text("raise OSError('libamd_smi.so.27: cannot open shared object file')")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return package


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]


def test_module_of_the_sdk_replaces_a_package_that_does_not_load(
    installed: Path, tmp_path: Path
) -> None:
    root = sdk(tmp_path / "rocm")
    module = load_binding([tmp_path / "none", root])
    assert module.here == str(root / "share/amd_smi/amdsmi/__init__.py")
    assert load_binding([]) is module
    forget()


def test_sdk_is_found_by_the_variable_of_rocm(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROCM_HOME", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(sdk(tmp_path / "rocm")))
    assert load_binding().here.startswith(str(tmp_path / "rocm"))
    forget()


def test_sdk_in_pythons_own_packages_is_found(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip installs it: below _rocm_sdk_core."""
    sdk(tmp_path / "_rocm_sdk_core")
    for name in ("ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "_rocm_sdk_core" in load_binding().here
    forget()


def test_next_sdk_is_tried_and_every_failure_is_named(installed: Path, tmp_path: Path) -> None:
    old, new = sdk(tmp_path / "a", "raise AttributeError('x: undefined symbol: f')"), tmp_path / "b"
    with pytest.raises(BindingError, match=r"a/share/amd_smi \(libamd_smi\.so has no f"):
        load_binding([old])
    assert str(old / "share/amd_smi") not in sys.path
    assert load_binding([old, sdk(new)]).here.startswith(str(new))
    forget()


def test_package_that_loads_has_precedence(package: Path, tmp_path: Path) -> None:
    package.write_text("here = 'installed'")
    assert load_binding([sdk(tmp_path / "rocm")]).here == "installed"
    forget()


def test_remedy_names_the_path_to_add(installed: Path) -> None:
    with pytest.raises(BindingError) as caught:
        load_binding([])
    assert "add <root>/share/amd_smi to PYTHONPATH" in caught.value.remedy


@pytest.mark.parametrize(
    "place",
    [
        "",
        "share",
        "share/amd_smi",
        "share/amd_smi/amdsmi",
        "share/amd_smi/amdsmi/__init__.py",
        "share/amd_smi/amdsmi/interface.py",
    ],
)
def test_directory_that_others_may_write_is_not_imported(
    installed: Path, tmp_path: Path, place: str
) -> None:
    root = sdk(tmp_path / "rocm")
    (root / "share/amd_smi/amdsmi/interface.py").write_text("")
    (root / "share/amd_smi/amdsmi/library.so").symlink_to("nowhere")
    assert sdk_modules([root]) == [root / "share/amd_smi"]
    (root / place).chmod(0o777)
    assert sdk_modules([root]) == []
    with pytest.raises(BindingError, match="is not used, because other users can write"):
        load_binding([root])
