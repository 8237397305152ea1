from weights.config import ExpertsConfig, LayerKind, RopeConfig, TargetConfig
from weights.demo import demo_directory, demo_prompts
from weights.draft.config import BlockConfig, EagleConfig
from weights.errors import CheckpointError
from weights.files.header import TensorEntry
from weights.inspect import Inspection, inspect_checkpoint
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target
from weights.report import BindingReport, Resolved
from weights.shard import Shard

__all__ = [
    "BindingReport",
    "BlockConfig",
    "CheckpointError",
    "EagleConfig",
    "ExpertsConfig",
    "Inspection",
    "LayerKind",
    "LoadedEagle",
    "LoadedTarget",
    "Resolved",
    "RopeConfig",
    "Shard",
    "TargetConfig",
    "TensorEntry",
    "demo_directory",
    "demo_prompts",
    "inspect_checkpoint",
    "load_eagle",
    "load_target",
]
