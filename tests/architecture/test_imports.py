"""Who may import whom, and what the control plane must run without."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
HEAVY = ("torch", "transformers", "triton", "peft")


def test_the_import_contracts_hold() -> None:
    result = subprocess.run(
        [PROGRAMS / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


def test_the_control_plane_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, manylora.platform.app, manylora.web.app, manylora.engine.text\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
