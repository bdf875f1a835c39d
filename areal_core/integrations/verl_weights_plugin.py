"""What checkpoint_engine.custom_backend_module of verl names: importing this registers the backend "areal_core"."""

from areal_core.integrations import verl_weights

PATCHES = verl_weights.register()
