"""Functions of the page's modules without a document."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from wattspan_exporters.page import STATIC_DIRECTORY

ELEMENT = """
const has = {}, element = {
  getAttribute: (name) => has[name] ?? null,
  setAttribute: (name, value) => { has[name] = String(value); },
  removeAttribute: (name) => { delete has[name]; },
};
"""


def told(tmp_path: Path, program: str) -> Any:
    """Output of ``program``, which imports the modules."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    shutil.copytree(STATIC_DIRECTORY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    file = tmp_path / "page" / "program.js"
    file.write_text(program)
    done = subprocess.run([node, file], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def attributes_after(tmp_path: Path, *sets: dict[str, object]) -> Any:
    calls = "".join(f"set(element, {json.dumps(one)});" for one in sets)
    return told(
        tmp_path,
        f'import {{ set }} from "./elements.js";{ELEMENT}{calls}console.log(JSON.stringify(has));',
    )


def test_unpressed_button_has_aria_state(tmp_path: Path) -> None:
    pressed = {"aria-pressed": True, "hidden": True}
    assert attributes_after(tmp_path, pressed, {"aria-pressed": False, "hidden": False}) == {
        "aria-pressed": "false"
    }


def test_unknown_values_remove_the_attribute(tmp_path: Path) -> None:
    before = {"aria-label": "x", "dx": 6, "tabindex": 0}
    assert attributes_after(tmp_path, before, {"aria-label": None, "dx": None}) == {"tabindex": "0"}


@pytest.mark.parametrize(("others", "order"), [(100, "ab"), (1000, "ba")])
def test_old_columns_are_removed(tmp_path: Path, others: int, order: str) -> None:
    program = f"""
      import {{ Order }} from "./layout.js";
      const order = new Order();
      order.of("column", [{{ id: "a", watts: 2 }}, {{ id: "b", watts: 1 }}], 4);
      for (let n = 0; n < {others}; n += 1) order.of(`other ${{n}}`, [], 4);
      const now = order.of("column", [{{ id: "a", watts: 2 }}, {{ id: "b", watts: 2.1 }}], 4);
      console.log(JSON.stringify(now.map((node) => node.id).join("")));
    """
    assert told(tmp_path, program) == order


@pytest.mark.parametrize(
    ("joules", "half_width", "text"),
    [
        ("undefined", "undefined", "–"), ("0.0825", "0.0009", "82.5 ± 0.9 mJ"),
        ("0.0825", "0.00091", "82.5 ± 1.0 mJ"), ("114.3", "5", "114 ± 5 J"),
        ("0.9996", "0.1", "1.00 ± 0.10 J"), ("4567", "2000", "4.57 ± 2.00 kJ"),
        ("0", "0", "0 ± 0 J"),
    ],
)  # fmt: skip
def test_estimate_has_its_half_width_in_the_same_unit(
    tmp_path: Path, joules: str, half_width: str, text: str
) -> None:
    program = f"""
      import {{ estimate }} from "./figures.js";
      console.log(JSON.stringify(estimate({joules}, {half_width})));
    """
    assert told(tmp_path, program).replace("\u00a0", " ") == text
