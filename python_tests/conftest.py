"""Tests use the areal_core that is installed (or that PYTHONPATH names), and so do the processes they start.

A child started with -m or -c looks into its working directory first; from the repository's root it would find the
source tree, which has no native module. So the tests run in their own folder.
"""

import os
from pathlib import Path

from hypothesis import settings


def pytest_configure() -> None:
    if path := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep))
    os.chdir(Path(__file__).parent)
    # Continuous integration repeats the same examples; at a desk every run looks for new ones.
    settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")
