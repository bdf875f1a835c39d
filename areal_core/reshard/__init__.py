"""Weight transfer: new versions of a model's tensors, from the trainer to the processes that generate."""

from areal_core.reshard.control import new_token
from areal_core.reshard.data_plane import DataPlaneOptions
from areal_core.reshard.draft import Draft
from areal_core.reshard.executor import Executor, Progress, TransferStats
from areal_core.reshard.layout import Layout, Region, Storage, TensorLayout
from areal_core.reshard.names import LoRA, NameMap
from areal_core.reshard.placements import Box, Flat, Mesh, Placement, Ragged, Replicate, Shard, StridedShard
from areal_core.reshard.plan import LowerBound, Message, Plan, PlanStats, RankPlan, plan
from areal_core.reshard.process_group import ProcessGroupTransport
from areal_core.reshard.publish import Update, UpdateProgress, UpdateStats, WeightSender
from areal_core.reshard.receive import WeightReceiver
from areal_core.reshard.sources import (
    gather_layout,
    layout_of_model,
    layout_of_state_dict,
    local_buffers,
    merge_layouts,
)
from areal_core.reshard.sources_safetensors import layout_of_safetensors, safetensors_buffers
from areal_core.reshard.spec import Spec
from areal_core.reshard.topology import Topology, parse_rate
from areal_core.reshard.transports import (
    CudaIpcTransport,
    ExposedBuffer,
    InprocGroup,
    InprocTransport,
    SharedTensors,
    ShmTransport,
    TcpTransport,
    Transport,
)
from areal_core.reshard.version_store import PublishStats, Snapshot, VersionStore

__all__ = [
    "Box",
    "CudaIpcTransport",
    "DataPlaneOptions",
    "Draft",
    "Executor",
    "ExposedBuffer",
    "Flat",
    "InprocGroup",
    "InprocTransport",
    "Layout",
    "LoRA",
    "LowerBound",
    "Mesh",
    "Message",
    "NameMap",
    "Placement",
    "Plan",
    "PlanStats",
    "ProcessGroupTransport",
    "Progress",
    "PublishStats",
    "Ragged",
    "RankPlan",
    "Region",
    "Replicate",
    "Shard",
    "SharedTensors",
    "ShmTransport",
    "Snapshot",
    "Spec",
    "Storage",
    "StridedShard",
    "TcpTransport",
    "TensorLayout",
    "Topology",
    "TransferStats",
    "Transport",
    "Update",
    "UpdateProgress",
    "UpdateStats",
    "VersionStore",
    "WeightReceiver",
    "WeightSender",
    "gather_layout",
    "layout_of_model",
    "layout_of_safetensors",
    "layout_of_state_dict",
    "local_buffers",
    "merge_layouts",
    "new_token",
    "parse_rate",
    "plan",
    "safetensors_buffers",
]
