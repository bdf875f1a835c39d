"""The kernels inside other frameworks: one file per framework, imported by name, such as `areal_core.integrations.trl`.

Each file has `apply() -> Patches`, which replaces functions of the framework by those of `areal_core.ops`. Importing a
file here imports no framework; `apply` does.
"""

from areal_core.integrations._patch import Patches

__all__ = ["Patches"]
