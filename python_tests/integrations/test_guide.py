"""The code of docs/integrations.md runs where the framework is installed."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "integrations.md"
# What a section's code imports; a section without an entry needs nothing.
NEEDS = {
    "AReaL": "areal.utils.functional",
    "NeMo-RL": "nemo_rl.data.packing",
    "prime-rl": "prime_rl.trainer.rl.loss",
    "slime": "slime.utils.ppo_utils",
    "TRL": "trl.trainer.utils",
    "verl": "verl.trainer.ppo.core_algos",
    "OpenRLHF": "openrlhf.models.loss",
    "Hugging Face transformers": "transformers",
}


def sections() -> dict[str, str]:
    _, *parts = re.split(r"^## (.+)$", GUIDE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def module(name: str) -> str:
    return name.lower().replace("-", "_")


@pytest.mark.parametrize("name", sections())
def test_a_section_runs(name: str) -> None:
    if package := NEEDS.get(name):
        pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    blocks = re.findall(r"^```python\n(.*?)^```", sections()[name], re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, f"{GUIDE}: {name}", "exec"), namespace)


@pytest.mark.parametrize(
    "name", [name for name in sections() if f"from areal_core.integrations import {module(name)}" in sections()[name]]
)
def test_a_section_names_what_is_replaced(name: str) -> None:
    table = importlib.import_module(f"areal_core.integrations.{module(name)}").SEAMS
    assert not [seam.name for seam in table if f"{seam.name}`" not in sections()[name]]
