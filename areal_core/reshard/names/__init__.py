"""Name maps: between canonical tensors (Hugging Face names) and the buffers of training and inference frameworks."""

from areal_core.reshard.names.lora import LoRA
from areal_core.reshard.names.name_map import FRAMEWORKS, NameMap

__all__ = ["FRAMEWORKS", "LoRA", "NameMap"]
