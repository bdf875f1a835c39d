"""What VERL_USE_EXTERNAL_MODULES names: importing this registers our functions in verl and replaces its own."""

from areal_core.integrations import verl

NAMES = verl.register()
PATCHES = verl.apply()
