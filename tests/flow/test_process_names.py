"""Process naming is a setting, and its reload removes earlier names."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from testbed.program import Running
from testbed.waiting import eventually

LIGHT = "import time\nwhile True:\n    sum(range(20000))\n    time.sleep(0.01)\n"


def commands(scrape: str) -> set[str]:
    rows = re.findall(r"^wattspan_process_energy_joules_total\{([^\n]*)\} ", scrape, re.MULTILINE)
    return {found[1] for row in rows if (found := re.search(r'command="([^"]*)"', row))}


def test_reload_that_hides_names_hides_those_of_before(tmp_path: Path) -> None:
    settings = tmp_path / "wattspan.toml"
    settings.write_text('[processes]\nnames = "script"\ntop = 1000\n')
    script = tmp_path / "very-private.py"
    script.write_text(LIGHT)
    with subprocess.Popen([sys.executable, "-I", str(script)]) as process:
        try:
            with Running(tmp_path, "--config", str(settings)) as agent:
                name = f"{Path(sys.executable).name} very-private.py"
                eventually(lambda: name in commands(agent.scrape()), "it is told by its script")
                settings.write_text('[processes]\nnames = "none"\ntop = 1000\n')
                agent.process.send_signal(signal.SIGHUP)
                eventually(lambda: "Reloading: processes.names changed" in agent.said, "reloading")
                served = eventually(lambda: served_anew(agent), "it serves again")
                row = f'pid="{process.pid}",command="process"'
                scrape = eventually(lambda: showing(served, row), "its row, without a name")
                told = {one for one in commands(scrape) if not one.startswith("(unseen)")}
                assert told <= {"process", "other", "unknown"}
                assert "very-private" not in scrape
                assert "very-private" not in fetch(served.replace("/metrics", "/live.json"))
        finally:
            process.kill()


def served_anew(agent: Running) -> str:
    """Address of the metrics after a reload."""
    addresses = re.findall(r"Serving (http\S+/metrics)\n", agent.said)
    return addresses[-1] if len(addresses) > 1 else ""


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())


def showing(address: str, text: str) -> str:
    scrape = fetch(address)
    return scrape if text in scrape else ""
